// Transpose of stored values, by their bits.
#pragma once

#include "common/memory.cuh"

namespace te_dist::cuda {

// kBits: of a value. Of 4 bits, src (rows, cols) and out (cols, rows) hold pairs along their last dimension, and extents
// count values. kLoad, kStore: bytes that can be read and written at a time, up to 8 for pairs and 16. Lines of both may
// be longer: what is behind in src is not turned, in out it becomes zeros.
//
// Matrices that lie one behind the other are turned each by its own blockIdx.y.
//
// kSquares: a value of src stands for `square` rows, which have it each, a value of out for as many columns. So every
// `square`-th row is turned, and a column of it becomes as many lines of out.
//
// A thread reads a patch of rows, turns it in registers and puts runs of columns into shared memory, where they join to
// columns of a block of threads: what is read of a row and written of a column at a time is 128 bytes or more.
template <int kBits, int kLoad, int kStore, bool kSquares>
struct Transpose {
  static constexpr int kThreads = 256;
  static constexpr int kBlocks = kLoad >= 8 ? 4 : 2;
  // A patch.
  static constexpr int kRowBytes = kBits == 4 ? 8 : 16, kWords = kRowBytes / 4;
  static constexpr int kRows = kBits == 4 ? 16 : 8;
  static constexpr int kCols = kRowBytes * 8 / kBits;
  static constexpr int kRunBytes = kRows * kBits / 8;
  // A block of them.
  static constexpr int kAcross = kBits == 32 ? 32 : 16;
  static constexpr int kBlockCols = kAcross * kCols, kBlockRows = kThreads / kAcross * kRows;
  static constexpr int kColumnBytes = kBlockRows * kBits / 8;
  static constexpr int kPiece = 16;  // bytes written at a time, at most

  struct Params {
    const void* src;
    void* out;
    Extents extents;  // that are turned of one matrix of src, in values
    int64_t src_cols, out_rows;  // of a line
    int64_t src_rows, out_cols;  // lines of a matrix
    int32_t square;
  };

  // Place of a byte of a column in shared memory. Threads that write, or read, at a time find different banks.
  TE_DIST_INLINE int position(int col, int byte) {
    return col * kColumnBytes + ((byte / kPiece ^ col / kCols % 8) * kPiece) + byte % kPiece;
  }

  // Where runs are half a piece, threads beside each other hold the two halves.
  static constexpr int kHalves = kRunBytes < kPiece ? 2 : 1;
  TE_DIST_INLINE int patch_col() { return int(threadIdx.x) / kHalves % kAcross * kCols; }
  TE_DIST_INLINE int patch_row() {
    return (int(threadIdx.x) / (kHalves * kAcross) * kHalves + int(threadIdx.x) % kHalves) * kRows;
  }

  // Two rows of pairs become one of values of the even columns, paired along rows, and one of the odd columns.
  TE_DIST_INLINE void pair_rows(uint32_t (&words)[kRows][kWords]) {
#pragma unroll
    for (int r = 0; r < kRows; r += 2) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t upper = words[r][w], lower = words[r + 1][w];
        words[r][w] = (upper & 0x0F0F0F0Fu) | (lower & 0x0F0F0F0Fu) << 4;
        words[r + 1][w] = (upper >> 4 & 0x0F0F0F0Fu) | (lower & 0xF0F0F0F0u);
      }
    }
  }

  // Bytes `i` of four words as one word.
  TE_DIST_INLINE uint32_t gather(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int i) {
    const uint32_t low = __byte_perm(a, b, uint32_t(i | (i + 4) << 4));
    const uint32_t high = __byte_perm(c, d, uint32_t(i | (i + 4) << 4));
    return __byte_perm(low, high, 0x5410);
  }

  // Column `j` of the patch.
  TE_DIST_INLINE void column(const uint32_t (&words)[kRows][kWords], int j, uint32_t (&run)[kRunBytes / 4]) {
#pragma unroll
    for (int k = 0; k < kRunBytes / 4; ++k) {
      if constexpr (kBits == 32) {
        run[k] = words[k][j];
      } else if constexpr (kBits == 16) {
        run[k] = __byte_perm(words[2 * k][j / 2], words[2 * k + 1][j / 2], j % 2 ? 0x7632 : 0x5410);
      } else if constexpr (kBits == 8) {
        run[k] = gather(words[4 * k][j / 4], words[4 * k + 1][j / 4], words[4 * k + 2][j / 4], words[4 * k + 3][j / 4], j % 4);
      } else {
        const int first = 8 * k + j % 2, w = j / 8, byte = j / 2 % 4;
        run[k] = gather(words[first][w], words[first + 2][w], words[first + 4][w], words[first + 6][w], byte);
      }
    }
  }

  TE_DIST_INLINE void read(const Params& p, int64_t first_row, int64_t first_col, char* columns) {
    const int64_t stride = p.src_cols * kBits / 8, byte = (first_col + patch_col()) * kBits / 8;
    const int64_t row = first_row + patch_row();
    const Inside rows = Inside::of(row, kRows, p.extents.rows), bytes = Inside::of(byte, kRowBytes, stride);
    const int64_t step = kSquares ? p.square : 1, lines = kSquares ? p.src_rows : p.extents.rows;
    const char* source = static_cast<const char*>(p.src) + (blockIdx.y * lines + row * step) * stride + byte;
    uint32_t words[kRows][kWords];
#pragma unroll
    for (int r = 0; r < kRows; ++r, source += step * stride) {
      load_run<kRowBytes, kLoad>(source, bytes.only_if(rows.has(r)), words[r]);
    }
    if constexpr (kBits == 4) pair_rows(words);
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      constexpr int kWidth = kRunBytes < kPiece ? kRunBytes : kPiece;
      uint32_t run[kRunBytes / 4];
      column(words, j, run);
#pragma unroll
      for (int at = 0; at < kRunBytes; at += kWidth) {
        store_words<kWidth>(columns + position(patch_col() + j, patch_row() * kBits / 8 + at), run + at / 4);
      }
    }
  }

  TE_DIST_INLINE void write(const Params& p, int64_t first_row, int64_t first_col, const char* columns) {
    constexpr int kPieces = kColumnBytes / kPiece, kStep = kThreads / kPieces;
    const int piece = threadIdx.x % kPieces, first = threadIdx.x / kPieces;
    const int64_t stride = p.out_rows * kBits / 8, byte = first_row * kBits / 8 + piece * kPiece;
    const Inside bytes = Inside::of(byte, kPiece, stride);
    const int64_t repeats = kSquares ? p.square : 1, lines = kSquares ? p.out_cols : p.extents.cols;
    char* target = static_cast<char*>(p.out) + (blockIdx.y * lines + (first_col + first) * repeats) * stride + byte;
#pragma unroll
    for (int col = first; col < first + kBlockCols; col += kStep, target += kStep * repeats * stride) {
      const uint4 v = *reinterpret_cast<const uint4*>(columns + position(col, piece * kPiece));
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
      if constexpr (kSquares) {
        const int64_t its_line = (first_col + col) * repeats, count = min(repeats, lines - its_line);
        for (int64_t i = 0; i < count; ++i) store_run<kPiece, kStore>(target + i * stride, bytes, words);
      } else {
        store_run<kPiece, kStore>(target, bytes.only_if(first_col + col < p.extents.cols), words);
      }
    }
  }

  TE_DIST_INLINE void run(const Params& p) {
    __shared__ alignas(kPiece) char columns[kBlockCols * kColumnBytes];
    const int64_t blocks_across = (p.extents.cols + kBlockCols - 1) / kBlockCols;
    const int64_t block_row = blockIdx.x / blocks_across, block_col = blockIdx.x - block_row * blocks_across;
    read(p, block_row * kBlockRows, block_col * kBlockCols, columns);
    __syncthreads();
    write(p, block_row * kBlockRows, block_col * kBlockCols, columns);
  }
};

}  // namespace te_dist::cuda
