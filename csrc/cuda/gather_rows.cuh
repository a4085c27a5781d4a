// Rows of a matrix by their numbers, as they are.
#pragma once

#include "common/memory.cuh"

namespace te_dist::cuda {

// Index: type of the numbers. kWidth: bytes that can be read and written at a time. kLanes: threads of a row.
template <class Index, int kWidth, int kLanes>
struct GatherRows {
  static constexpr int kThreads = 256, kBlocks = 4;
  static constexpr int kRows = kThreads / kLanes;
  static constexpr int kAhead = 8;  // pieces that are read before any is written
  static constexpr int kWords = kWidth < 4 ? 1 : kWidth / 4;

  struct Params {
    const void* x;  // (x_rows, row_bytes)
    int64_t x_rows;
    int64_t row_bytes;
    const Index* index;  // (rows,); where x has no row of a number, there are zeros
    int64_t rows;
    void* out;  // (rows, row_bytes)
  };

  TE_DIST_INLINE void run(const Params& p) {
    const int64_t row = int64_t(blockIdx.x) * kRows + threadIdx.x / kLanes;
    if (row >= p.rows) return;
    const int64_t number = __ldg(p.index + row);
    const bool is_inside = uint64_t(number) < uint64_t(p.x_rows);
    const char* from = static_cast<const char*>(p.x) + (is_inside ? number : 0) * p.row_bytes;
    char* to = static_cast<char*>(p.out) + row * p.row_bytes;
    constexpr int kStep = kLanes * kWidth;
    for (int64_t at = int64_t(threadIdx.x % kLanes) * kWidth; at < p.row_bytes; at += kAhead * kStep) {
      uint32_t words[kAhead][kWords] = {};
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (is_inside && at + i * kStep < p.row_bytes) load_words<kWidth>(from + at + i * kStep, words[i]);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (at + i * kStep < p.row_bytes) store_words<kWidth>(to + at + i * kStep, words[i]);
      }
    }
  }
};

}  // namespace te_dist::cuda
