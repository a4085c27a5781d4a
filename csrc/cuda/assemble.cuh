// Copies rectangles into their places of a larger matrix.
#pragma once

#include "common/memory.cuh"

namespace te_dist::cuda {

// kWidth: bytes that can be copied at a time. One row of blocks of the grid for each rectangle.
template <int kWidth>
struct Assemble {
  static constexpr int kThreads = 256;
  static constexpr int kBlocks = 4;
  static constexpr int kMaxParts = 48;

  struct Part {
    const char* data;
    int64_t stride;  // bytes
    int64_t rows;
    int64_t row_bytes;
    char* target;
  };

  struct Params {
    int64_t out_stride;  // bytes
    Part parts[kMaxParts];
  };

  TE_DIST_INLINE void run(const Params& p) {
    const Part& part = p.parts[blockIdx.y];
    const int64_t pieces_per_row = part.row_bytes / kWidth, pieces = pieces_per_row * part.rows;
    const int64_t step = int64_t(gridDim.x) * kThreads;
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < pieces; i += step) {
      const int64_t row = i / pieces_per_row, byte = (i - row * pieces_per_row) * kWidth;
      uint32_t words[4];
      load_words<kWidth>(part.data + row * part.stride + byte, words);
      store_words<kWidth>(part.target + row * p.out_stride + byte, words);
    }
  }
};

}  // namespace te_dist::cuda
