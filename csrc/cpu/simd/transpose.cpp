// Transpose of a matrix, keyed by the bits of an element and by nothing else.
#include "transpose.h"

#include <cstring>

#include "kernels_of_level.h"
#include "parallel.h"

namespace te_dist::cpu::TE_DIST_ISA {
namespace {

// body(row, col, rows, cols) for blocks of kFarRows x `width` elements.
template <class Body>
void for_each_block(const Transpose& op, int width, int threads, const Body& body) {
  const int64_t block_rows = (op.rows + kFarRows - 1) / kFarRows, block_cols = (op.cols + width - 1) / width;
  parallel_for(block_rows * block_cols, threads, [&](int64_t index) {
    const int64_t row = index / block_cols * kFarRows, col = index % block_cols * width;
    const int rows = int(op.rows - row < kFarRows ? op.rows - row : kFarRows);
    const int cols = int(op.cols - col < width ? op.cols - col : width);
    body(row, col, rows, cols);
  });
}

template <class T>
void transpose_elements(const Transpose& op, int threads) {
  const T* src = static_cast<const T*>(op.src);
  T* out = static_cast<T*>(op.out);
  for_each_block(op, kFarCols<T>, threads, [&](int64_t row, int64_t col, int rows, int cols) {
    const T* source = src + row * op.src_cols + col;
    transpose_far_block<T, true>(source, op.src_cols, rows, cols, out + col * op.out_rows + row, op.out_rows);
  });
}

// Splits pairs of rows of packed pairs of columns into pairs of rows of even, and of odd, columns; both are then bytes.
void transpose_nibbles(const Transpose& op, int threads) {
  const uint8_t* src = static_cast<const uint8_t*>(op.src);
  uint8_t* out = static_cast<uint8_t*>(op.out);
  const int64_t src_stride = op.src_cols / 2, out_stride = op.out_rows / 2;
  constexpr int kCols = 256;
  for_each_block(op, kCols, threads, [&](int64_t row, int64_t col, int rows, int cols) {
    alignas(64) uint8_t even[kFarRows / 2][kCols / 2], odd[kFarRows / 2][kCols / 2];
    for (int r = 0; r < rows / 2; ++r) {
      const uint8_t* upper = src + (row + 2 * r) * src_stride + col / 2;
      const uint8_t* lower = upper + src_stride;
      for (int c = 0; c < cols / 2; ++c) {
        even[r][c] = uint8_t((upper[c] & 0xF) | lower[c] << 4);
        odd[r][c] = uint8_t(upper[c] >> 4 | (lower[c] & 0xF0));
      }
    }
    uint8_t* target = out + col * out_stride + row / 2;
    transpose_block<uint8_t, true>(even[0], kCols / 2, rows / 2, cols / 2, target, 2 * out_stride);
    transpose_block<uint8_t, true>(odd[0], kCols / 2, rows / 2, cols / 2, target + out_stride, 2 * out_stride);
  });
}

// Zeros behind the rows in every line of `out`.
void clear_padding(const Transpose& op) {
  const int64_t pitch = op.out_rows * op.bits / 8, used = op.rows * op.bits / 8;
  char* line = static_cast<char*>(op.out);
  if (pitch == used) return;
  for (int64_t col = 0; col < op.cols; ++col, line += pitch) std::memset(line + used, 0, size_t(pitch - used));
}

}  // namespace

void transpose(const Transpose& op, int threads) {
  clear_padding(op);
  switch (op.bits) {
    case 4: return transpose_nibbles(op, threads);
    case 8: return transpose_elements<uint8_t>(op, threads);
    case 16: return transpose_elements<uint16_t>(op, threads);
    default: return transpose_elements<uint32_t>(op, threads);
  }
}

}  // namespace te_dist::cpu::TE_DIST_ISA
