// Randomized Hadamard transform of groups of 16 rows.
#pragma once

#include "common/butterfly.cuh"
#include "common/memory.cuh"

namespace te_dist::cuda {

// kWidth: bytes that can be read and written at a time, up to 8. A thread transforms 16 rows of some columns.
template <int kWidth>
struct Hadamard {
  static constexpr int kThreads = 128;
  static constexpr int kBlocks = 4;
  static constexpr int kGroup = kMixedRows;
  static constexpr int kCols = kWidth / 2;
  static constexpr int kWords = (kCols + 1) / 2;

  struct Params {
    const void* x;
    void* out;
    Extents extents;
    int64_t sign_mask;
  };

  TE_DIST_INLINE void run(const Params& p) {
    const int64_t threads_per_row = (p.extents.cols + kCols - 1) / kCols;
    const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t group = index / threads_per_row, col = index % threads_per_row * kCols;
    if (group * kGroup >= p.extents.rows) return;
    const int64_t first = (group * kGroup * p.extents.cols + col) * 2, row_bytes = p.extents.cols * 2;
    uint32_t words[kGroup][kWords];
    float values[kGroup][kCols];
#pragma unroll
    for (int r = 0; r < kGroup; ++r) {
      load_words<kWidth>(static_cast<const char*>(p.x) + first + r * row_bytes, words[r]);
    }
#pragma unroll
    for (int r = 0; r < kGroup; ++r) {
      const uint32_t flip = uint32_t(p.sign_mask >> r & 1) << 31;
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        values[r][c] = float_of(bits_of(BFloat16::value(words[r][c / 2], c % 2)) ^ flip);
      }
    }
    butterfly(values);
#pragma unroll
    for (int r = 0; r < kGroup; ++r) {
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        const uint32_t code = encode_bfloat16(values[r][c] * 0.25f);
        words[r][c / 2] = c % 2 ? words[r][c / 2] | code << 16 : code;
      }
      store_words<kWidth>(static_cast<char*>(p.out) + first + r * row_bytes, words[r]);
    }
  }
};

}  // namespace te_dist::cuda
