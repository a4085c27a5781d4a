// Transpose of stored values, by their bits.
#pragma once

#include "common/memory.cuh"

namespace te_dist::cuda {

// kBytes: of an element. A block of threads moves a square of 64 x 64 elements through shared memory; rows in it are one
// word longer, so that columns lie in different banks.
template <int kBytes>
struct Transpose {
  static constexpr int kThreads = 256;
  static constexpr int kBlocks = 4;
  static constexpr int kSide = 64;
  static constexpr int kPitch = kSide * kBytes + 4;

  struct Params {
    const void* src;
    void* out;
    Extents extents;  // of src
  };

  template <int kWidth>
  TE_DIST_INLINE void copy(void* target, const void* source) {
    uint32_t word;
    if constexpr (kWidth == 4) word = *static_cast<const uint32_t*>(source);
    if constexpr (kWidth == 2) word = *static_cast<const uint16_t*>(source);
    if constexpr (kWidth == 1) word = *static_cast<const uint8_t*>(source);
    store_words<kWidth>(target, &word);
  }

  TE_DIST_INLINE void run(const Params& p) {
    __shared__ alignas(16) char square[kSide * kPitch];
    const int64_t col_squares = (p.extents.cols + kSide - 1) / kSide;
    const int64_t first_row = blockIdx.x / col_squares * kSide, first_col = blockIdx.x % col_squares * kSide;
    const char* src = static_cast<const char*>(p.src);
    char* out = static_cast<char*>(p.out);
#pragma unroll
    for (int i = 0; i < kSide * kSide / kThreads; ++i) {
      const int r = (i * kThreads + threadIdx.x) / kSide, c = threadIdx.x % kSide;
      const int64_t row = first_row + r, col = first_col + c;
      if (row >= p.extents.rows || col >= p.extents.cols) continue;
      copy<kBytes>(square + r * kPitch + c * kBytes, src + (row * p.extents.cols + col) * kBytes);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSide * kSide / kThreads; ++i) {
      const int c = (i * kThreads + threadIdx.x) / kSide, r = threadIdx.x % kSide;
      const int64_t row = first_row + r, col = first_col + c;
      if (row >= p.extents.rows || col >= p.extents.cols) continue;
      copy<kBytes>(out + (col * p.extents.rows + row) * kBytes, square + r * kPitch + c * kBytes);
    }
  }
};

// 8-bit and packed 4-bit values, 16 bytes at a time: a block of threads moves 128 x 128 bytes. kBits 4: src (rows, cols)
// and out (cols, rows) hold pairs of their last dimension; extents count values. kLoad, kStore: bytes at a time.
template <int kBits, int kLoad, int kStore>
struct TransposeBytes {
  static constexpr int kThreads = 256;
  static constexpr int kBlocks = 4;
  static constexpr int kPerByte = 8 / kBits;
  static constexpr int kSide = 128;               // bytes of a row, and rows
  static constexpr int kCols = kSide * kPerByte;  // values of a row
  static constexpr int kRows = kSide * kPerByte;

  struct Params {
    const void* src;
    void* out;
    Extents extents;  // of src, in values
  };

  // A thread moves 4 x 4 bytes (8-bit), or 8 rows of 4 bytes of pairs (4-bit), from rows to columns in registers.
  static constexpr int kThreadRows = 4 * kPerByte;

  // Bytes `i` of four words as one word.
  TE_DIST_INLINE uint32_t gather(const uint32_t (&words)[4], int i) {
    const uint32_t low = __byte_perm(words[0], words[1], uint32_t(i | (i + 4) << 4));
    const uint32_t high = __byte_perm(words[2], words[3], uint32_t(i | (i + 4) << 4));
    return __byte_perm(low, high, 0x5410);
  }

  // Word `word` of column `col` of the transpose; neighbours in either direction lie in different banks.
  TE_DIST_INLINE int position(int col, int word) { return col * 32 + (word ^ (col / 4 % 8 * 4)); }

  TE_DIST_INLINE void run(const Params& p) {
    __shared__ alignas(16) uint32_t transposed[kCols * kSide / 4];
    const int64_t src_stride = p.extents.cols / kPerByte, out_stride = p.extents.rows / kPerByte;
    const int64_t col_squares = (p.extents.cols + kCols - 1) / kCols;
    const int64_t first_row = blockIdx.x / col_squares * kRows, first_col = blockIdx.x % col_squares * kCols;
    const int word_of_row = threadIdx.x % 32;
    const Inside bytes = Inside::of(first_col / kPerByte + word_of_row * 4, 4, src_stride);
#pragma unroll
    for (int i = 0; i < kRows / kThreadRows / 8; ++i) {
      const int chunk = i * 8 + threadIdx.x / 32;
      uint32_t words[kThreadRows];
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
        const int64_t row = first_row + chunk * kThreadRows + r;
        const char* source = static_cast<const char*>(p.src) + row * src_stride + first_col / kPerByte + word_of_row * 4;
        load_run<4, kLoad>(source, bytes.only_if(row < p.extents.rows), &words[r]);
      }
      turn(words, word_of_row, chunk, transposed);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCols / 32; ++i) {
      const int col = i * 32 + threadIdx.x / 8, chunk = threadIdx.x % 8;
      if (first_col + col >= p.extents.cols) continue;
      const uint4 v = *reinterpret_cast<const uint4*>(&transposed[position(col, chunk * 4)]);
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
      const int64_t byte = first_row / kPerByte + chunk * 16;
      char* target = static_cast<char*>(p.out) + (first_col + col) * out_stride + byte;
      store_run<16, kStore>(target, Inside::of(byte, 16, out_stride), words);
    }
  }

  TE_DIST_INLINE void turn(const uint32_t (&words)[kThreadRows], int word_of_row, int chunk, uint32_t* transposed) {
    if constexpr (kBits == 8) {
#pragma unroll
      for (int c = 0; c < 4; ++c) transposed[position(word_of_row * 4 + c, chunk)] = gather(words, c);
    } else {
      uint32_t even[4], odd[4];  // columns of pairs of rows
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t upper = words[2 * r], lower = words[2 * r + 1];
        even[r] = (upper & 0x0F0F0F0Fu) | (lower & 0x0F0F0F0Fu) << 4;
        odd[r] = (upper >> 4 & 0x0F0F0F0Fu) | (lower & 0xF0F0F0F0u);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        transposed[position(word_of_row * 8 + 2 * c, chunk)] = gather(even, c);
        transposed[position(word_of_row * 8 + 2 * c + 1, chunk)] = gather(odd, c);
      }
    }
  }
};

}  // namespace te_dist::cuda
