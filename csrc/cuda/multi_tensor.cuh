// One launch for any number of matrices.
#pragma once

#include "common/patch.cuh"

namespace te_dist::cuda {

// Blocks of threads are dealt out to matrices in order; each goes on as a block of a launch for its matrix alone.
template <class Each_>
struct MultiTensor {
  using Each = Each_;
  static constexpr int kThreads = Each::kThreads;
  static constexpr int kBlocks = Each::kBlocks;

  struct Params {
    const typename Each::Params* each;
    const int64_t* ends;  // blocks of this matrix and of those before it
    int64_t count;
    const uint32_t* noop;  // nothing is done where it is set; null: never set
  };

  // Index of the first end behind `block`: every round of a warp leaves a 32nd of the candidates.
  TE_DIST_INLINE int64_t find(const Params& p, int64_t block) {
    const int64_t lane = threadIdx.x % 32;
    int64_t first = 0, count = p.count;
    while (count > 1) {
      const int64_t step = (count + 31) / 32, last = min(first + (lane + 1) * step, first + count) - 1;
      const uint32_t behind = __ballot_sync(kFullWarp, p.ends[last] > block);
      const int64_t chosen = first + (__ffs(int(behind)) - 1) * step;
      count = min(step, first + count - chosen);
      first = chosen;
    }
    return first;
  }

  TE_DIST_INLINE void run(const Params& p) {
    static_assert(sizeof(typename Each::Params) % sizeof(int64_t) == 0, "parameters are copied by words");
    constexpr int kWords = sizeof(typename Each::Params) / sizeof(int64_t);
    __shared__ int64_t words[kWords];
    if (p.noop && *p.noop) return;
    const int64_t index = find(p, blockIdx.x);
    if (threadIdx.x < kWords) words[threadIdx.x] = reinterpret_cast<const int64_t*>(p.each + index)[threadIdx.x];
    __syncthreads();
    const int64_t before = index ? p.ends[index - 1] : 0;
    Each::run(reinterpret_cast<const typename Each::Params&>(words), blockIdx.x - before);
  }
};

}  // namespace te_dist::cuda
