// The Hadamard transform of 16 rows.
#pragma once

#include "types.cuh"

namespace te_dist::cuda {

constexpr int kMixedRows = 16;

// Rows are summed and subtracted at distance 1, then 2, 4, 8; this order is part of the definition.
template <int kCols>
TE_DIST_INLINE void butterfly(float (&values)[kMixedRows][kCols]) {
#pragma unroll
  for (int distance = 1; distance < kMixedRows; distance *= 2) {
#pragma unroll
    for (int a = 0; a < kMixedRows; ++a) {
      if (a & distance) continue;
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        const float sum = values[a][c] + values[a + distance][c], difference = values[a][c] - values[a + distance][c];
        values[a][c] = sum;
        values[a + distance][c] = difference;
      }
    }
  }
}

// Four columns of 16 rows, two words of bf16 a row, without the factor of 1/4: calls `take` with every word's columns.
// The sign of row i is flipped where bit i of `sign_mask` is set.
template <class Take>
TE_DIST_INLINE void transform_words(const uint32_t (&words)[kMixedRows][2], uint32_t sign_mask, const Take& take) {
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    float values[kMixedRows][2];
#pragma unroll
    for (int i = 0; i < kMixedRows; ++i) {
      const uint32_t word = words[i][w] ^ (sign_mask >> i & 1u) * 0x80008000u;
      values[i][0] = BFloat16::value(word, 0);
      values[i][1] = BFloat16::value(word, 1);
    }
    butterfly(values);
    take(w, values);
  }
}

}  // namespace te_dist::cuda
