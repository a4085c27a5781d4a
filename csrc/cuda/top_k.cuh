// The columns of the largest values of each row.
#pragma once

#include "common/types.cuh"

namespace te_dist::cuda {

// A warp for a row. It looks through all columns for each of those that are found. kHeld: columns that a lane holds in
// registers, of at most 32 * kHeld; 0: it reads them again and again.
template <int kHeld>
struct TopK {
  static constexpr int kThreads = 256, kBlocks = 2, kRows = kThreads / 32;

  struct Params {
    const float* x;     // (rows, cols)
    const float* bias;  // (cols,), is added; or null
    int64_t rows;
    int64_t cols;
    int64_t count;  // that are found
    int64_t* out;   // (rows, count)
  };

  // Values in their order, of equal ones that of the first column the largest; NaN is above all others. Never all ones.
  TE_DIST_INLINE uint64_t rank(float value, uint32_t col) {
    const uint32_t bits = bits_of(value + 0.0f);  // of zeros one
    const uint32_t order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return uint64_t(value != value ? 0xFFFFFFFFu : order) << 32 | (0xFFFFFFFEu - col);
  }

  TE_DIST_INLINE uint64_t largest_of_warp(uint64_t value) {
    const uint32_t high = uint32_t(value >> 32), most = __reduce_max_sync(0xFFFFFFFFu, high);
    return uint64_t(most) << 32 | __reduce_max_sync(0xFFFFFFFFu, high == most ? uint32_t(value) : 0);
  }

  TE_DIST_INLINE void run(const Params& p) {
    const int64_t row = int64_t(blockIdx.x) * kRows + threadIdx.x / 32;
    if (row >= p.rows) return;
    const float* x = p.x + row * p.cols;
    const int lane = threadIdx.x % 32;
    const auto rank_of = [&](int64_t col) {
      return rank(__ldg(x + col) + (p.bias ? __ldg(p.bias + col) : 0.0f), uint32_t(col));
    };
    uint64_t held[kHeld ? kHeld : 1] = {};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (lane + 32 * i < p.cols) held[i] = rank_of(lane + 32 * i);
    }
    uint64_t last = ~uint64_t(0);  // that was found
    for (int64_t k = 0; k < p.count; ++k) {
      uint64_t found = 0;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (held[i] < last && held[i] > found) found = held[i];
      }
      for (int64_t col = lane; kHeld == 0 && col < p.cols; col += 32) {
        const uint64_t its = rank_of(col);
        if (its < last && its > found) found = its;
      }
      last = largest_of_warp(found);
      if (threadIdx.x % 32 == 0) p.out[row * p.count + k] = 0xFFFFFFFEu - uint32_t(last);
    }
  }
};

}  // namespace te_dist::cuda
