// Transposes of small blocks of 1, 2 or 4 byte elements.
#pragma once

#include <cstdint>

namespace te_dist::cpu::TE_DIST_ISA {

// out[c][r] = src[r][c]; strides in elements.
template <class T>
static inline void transpose_block(const T* __restrict src, int64_t src_stride, int rows, int cols, T* __restrict out,
                                   int64_t out_stride) {
  for (int c = 0; c < cols; ++c) {
    for (int r = 0; r < rows; ++r) out[c * out_stride + r] = src[r * src_stride + c];
  }
}

}  // namespace te_dist::cpu::TE_DIST_ISA
