// Loops over threads of OpenMP, the pool that torch uses too.
#pragma once

#include "vector.h"

namespace te_dist::cpu::TE_DIST_ISA {

// body(index) for every index below `count`, split evenly into contiguous runs. What was streamed is visible
// afterwards.
template <class Body>
void parallel_for(int64_t count, int threads, const Body& body) {
  if (threads <= 1 || count <= 1) {
    for (int64_t index = 0; index < count; ++index) body(index);
    finish_streaming();
    return;
  }
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static) nowait
    for (int64_t index = 0; index < count; ++index) body(index);
    finish_streaming();
  }
}

}  // namespace te_dist::cpu::TE_DIST_ISA
