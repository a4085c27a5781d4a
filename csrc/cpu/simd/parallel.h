// Loops over threads of OpenMP, the pool that torch uses too.
#pragma once

#include <cstdint>

namespace te_dist::cpu::TE_DIST_ISA {

// body(index) for every index below `count`, split evenly into contiguous runs.
template <class Body>
void parallel_for(int64_t count, int threads, const Body& body) {
  if (threads <= 1 || count <= 1) {
    for (int64_t index = 0; index < count; ++index) body(index);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t index = 0; index < count; ++index) body(index);
}

}  // namespace te_dist::cpu::TE_DIST_ISA
