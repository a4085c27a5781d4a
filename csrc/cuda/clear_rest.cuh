// Zeros where rows of a matrix belong to no group.
#pragma once

#include "common/memory.cuh"

namespace te_dist::cuda {

// kWidth: bytes that can be written at a time.
template <int kWidth>
struct ClearRest {
  static constexpr int kThreads = 256, kBlocks = 8;

  struct Params {
    void* out;
    int64_t row_bytes;
    int64_t rows;
    const int32_t* end;  // of the last group
  };

  TE_DIST_INLINE void run(const Params& p) {
    const uint32_t zeros[4] = {};
    const int64_t step = int64_t(gridDim.x) * kThreads, pieces = p.rows * p.row_bytes / kWidth;
    const int64_t first = __ldg(p.end) * p.row_bytes / kWidth + int64_t(blockIdx.x) * kThreads + threadIdx.x;
    for (int64_t i = first; i < pieces; i += step) {
      store_words<kWidth>(static_cast<char*>(p.out) + i * kWidth, zeros);
    }
  }
};

}  // namespace te_dist::cuda
