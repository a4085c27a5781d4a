// Rows that are sums of rows of another matrix.
#pragma once

#include "common/memory.cuh"
#include "common/types.cuh"

namespace te_dist::cuda {

// A warp for a row. kWidth: bytes read and written at a time.
template <class Element, int kWidth>
struct GatherSum {
  static constexpr int kThreads = 256, kBlocks = 4;
  static constexpr int kLanes = 32, kRows = kThreads / kLanes;
  static constexpr int kAhead = 8;  // rows that are read before any is added
  static constexpr int kWords = kWidth < 4 ? 1 : kWidth / 4;
  static constexpr int kValues = kWidth / Element::kBytes;

  struct Params {
    const void* x;  // (x_rows, cols)
    int64_t x_rows;
    int64_t cols;
    const int64_t* positions;  // (rows, copies)
    int64_t rows;
    int64_t copies;
    void* out;  // (rows, cols)
  };

  TE_DIST_INLINE void run(const Params& p) {
    const int64_t row = int64_t(blockIdx.x) * kRows + threadIdx.x / kLanes;
    if (row >= p.rows) return;
    const int64_t pitch = p.cols * Element::kBytes;
    const char* x = static_cast<const char*>(p.x);
    char* out = static_cast<char*>(p.out) + row * pitch;
    for (int64_t at = int64_t(threadIdx.x % kLanes) * kWidth; at < pitch; at += kLanes * kWidth) {
      float sums[kValues] = {};
      for (int64_t copy = 0; copy < p.copies; copy += kAhead) {
        add(p, x + at, row * p.copies + copy, p.copies - copy, sums);
      }
      uint32_t words[kWords] = {};
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        words[v / Element::kPerWord] |= Element::store(sums[v]) << (32 / Element::kPerWord * (v % Element::kPerWord));
      }
      store_words<kWidth>(out + at, words);
    }
  }

  // Adds pieces of the rows at positions from `first` on, one after the other.
  TE_DIST_INLINE void add(const Params& p, const char* x, int64_t first, int64_t left, float (&sums)[kValues]) {
    uint32_t words[kAhead][kWords] = {};
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t from = i < left ? __ldg(p.positions + first + i) : -1;
      if (from >= 0 && from < p.x_rows) load_words<kWidth>(x + from * p.cols * Element::kBytes, words[i]);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) sums[v] += Element::value(words[i][v / Element::kPerWord], v % Element::kPerWord);
    }
  }
};

}  // namespace te_dist::cuda
