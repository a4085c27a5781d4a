// Functions of scales, over arrays of them.
#pragma once

#include "vector.h"

namespace te_dist::cpu::TE_DIST_ISA {

// out[i] = function(in[i]) a vector at a time; arrays are padded to whole vectors.
template <class Function>
static inline void apply(const float* in, int count, const Function& function) {
  for (int i = 0; i < count; i += kLanes) function(i, load<F32>(in + i));
}

}  // namespace te_dist::cpu::TE_DIST_ISA
