// The upper half of a matrix plus its lower half.
#pragma once

#include "common/types.cuh"

namespace te_dist::cuda {

template <class Element>
struct AddHalves {
  static constexpr int kThreads = 256, kBlocks = 4;

  struct Params {
    const float* x;  // (2, count)
    int64_t count;
    void* out;  // (count,)
  };

  TE_DIST_INLINE void run(const Params& p) {
    const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (at >= p.count) return;
    const uint32_t sum = Element::store(__ldg(p.x + at) + __ldg(p.x + p.count + at));
    if constexpr (Element::kBytes == 4) {
      static_cast<uint32_t*>(p.out)[at] = sum;
    } else {
      static_cast<uint16_t*>(p.out)[at] = uint16_t(sum);
    }
  }
};

}  // namespace te_dist::cuda
