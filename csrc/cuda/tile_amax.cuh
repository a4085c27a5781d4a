// Largest magnitude of every tile.
#pragma once

#include "common/overlap.cuh"
#include "common/source.cuh"

namespace te_dist::cuda {

// Zeros, before a kernel that raises them and waits for this one.
struct Zero {
  static constexpr int kThreads = 256;
  static constexpr int kBlocks = 8;

  struct Params {
    float* out;
    int64_t count;
  };

  TE_DIST_INLINE void run(const Params& p) {
    let_next_begin();
    const int64_t step = int64_t(gridDim.x) * kThreads;
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < p.count; i += step) p.out[i] = 0.0f;
  }
};

// kLoad: bytes that can be read at a time. A thread walks down 8 columns of a strip of rows and hands in the magnitudes
// whenever a tile ends; lanes of a warp, side by side, that hold a part of the same tile hand in one. kWhole: strips are
// made of whole tiles, of one column or of columns that fall to one thread or to some of a warp (a power of two), and
// magnitudes are stored; otherwise `out` is raised, from zero.
template <class Source, int kLoad, bool kWhole>
struct TileAmax {
  using Element = typename Source::Element;
  static constexpr int kThreads = 256;
  static constexpr int kBlocks = Element::kPerWord == 2 && kLoad >= 8 ? (Source::kIsComputed ? 3 : 4) : 2;
  static constexpr int kWords = kPatch / Element::kPerWord;
  static constexpr int kBlockCols = kThreads * kPatch;

  struct Params {
    typename Source::Params source;
    Extents extents;
    Phase phase;
    Extents tile;  // no larger than the matrix in a dimension without phase: one tile
    float* out;
    int64_t grid_cols;
    int64_t strip;  // rows that a block of threads reduces
  };

  const Params& p;
  int64_t row, row_end, col;
  Inside cols;
  int64_t tile_row;
  int64_t tile_col, last_tile_col;  // of the first and the last of its columns
  uint32_t largest[kWords];

  // Magnitude of the tile of the first column, the largest of those that neighbouring lanes have for it.
  TE_DIST_DEVICE void hand_in(float magnitude) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float other = __shfl_down_sync(kFullWarp, magnitude, distance);
      const int64_t other_tile = __shfl_down_sync(kFullWarp, tile_col, distance);
      if (lane + distance < 32 && other_tile == tile_col) magnitude = fmaxf(magnitude, other);
    }
    const int64_t before = __shfl_up_sync(kFullWarp, tile_col, 1);
    const bool is_first = lane == 0 || before != tile_col;
    if (is_first) raise_out(tile_col, magnitude);
  }

  TE_DIST_DEVICE void raise_out(int64_t its_tile, float magnitude) const {
    if (magnitude > 0.0f) raise_amax(p.out + tile_row * p.grid_cols + its_tile, magnitude);
  }

  TE_DIST_DEVICE float column(int j) const {
    return Element::value(largest[j / Element::kPerWord], j % Element::kPerWord);
  }

  TE_DIST_INLINE float largest_of(const uint32_t (&words)[kWords]) {
    uint32_t word = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) word = Element::raise(word, words[w]);
    return Element::largest(word);
  }

  TE_DIST_DEVICE void raise_tiles() const {
    wait_for_previous();
    const bool is_one = tile_col == last_tile_col;
    hand_in(is_one ? largest_of(largest) : 0.0f);
    if (is_one) return;
#pragma unroll
    for (int j = 0; j < kPatch; ++j) raise_out((p.phase.col + col + j) / p.tile.cols, column(j));
  }

  TE_DIST_DEVICE void store_tiles() const {
    float* out = p.out + tile_row * p.grid_cols + tile_col;
    if (p.tile.cols == 1) {
#pragma unroll
      for (int j = 0; j < kPatch; ++j) {
        if (cols.has(j)) out[j] = column(j);
      }
      return;
    }
    const int lanes = int(p.tile.cols) / kPatch;
    float magnitude = largest_of(largest);
    for (int mask = 1; mask < lanes; mask *= 2) magnitude = larger_of_lanes(magnitude, mask);
    if (threadIdx.x % lanes == 0 && tile_col < p.grid_cols) *out = magnitude;
  }

  TE_DIST_DEVICE void raise(const uint32_t (&words)[kWords]) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) largest[w] = Element::raise(largest[w], words[w]);
  }

  TE_DIST_DEVICE void clear() {
#pragma unroll
    for (int w = 0; w < kWords; ++w) largest[w] = 0;
  }

  // Eight rows, each a row of tiles of which a lane holds one eighth or less: it reduces and stores one of the eight.
  TE_DIST_DEVICE void store_rows(const uint32_t (&words)[kPatch][kWords]) const {
    using Rows = SharedOut<1, 2, 4>;
    float values[kPatch], owned[Rows::kOwned];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) values[i] = largest_of(words[i]);
    Rows::largest(values, owned);
    const int lanes = int(p.tile.cols) / kPatch;
    for (int mask = kPatch; mask < lanes; mask *= 2) owned[0] = larger_of_lanes(owned[0], mask);
    const bool writes = threadIdx.x % lanes < kPatch && tile_col < p.grid_cols && row + Rows::first() < row_end;
    if (writes) p.out[(tile_row + Rows::first()) * p.grid_cols + tile_col] = owned[0];
  }

  // Whole tiles, eight rows read at a time whether or not they are of one tile.
  TE_DIST_DEVICE void reduce_whole() {
    typename Source::template Reader<kLoad> reader(p.source, p.extents, row, col, cols);
    tile_row = (p.phase.row + row) / p.tile.rows;
    const bool by_rows = p.tile.rows == 1 && p.tile.cols >= kPatch * kPatch;
    int64_t tile_end = (tile_row + 1) * p.tile.rows - p.phase.row;
    for (; row < row_end; row += kPatch) {
      uint32_t words[kPatch][kWords];
      reader.read(Inside::of(row, kPatch, row_end), words);
      if (by_rows) {
        store_rows(words);
        tile_row += kPatch;
        continue;
      }
#pragma unroll
      for (int i = 0; i < kPatch; ++i) {
        raise(words[i]);
        if (row + i + 1 != tile_end && row + i + 1 != row_end) continue;
        store_tiles();
        clear();
        ++tile_row;
        tile_end += p.tile.rows;
      }
    }
  }

  TE_DIST_DEVICE void reduce() {
    typename Source::template Reader<kLoad> reader(p.source, p.extents, row, col, cols);
    tile_row = (p.phase.row + row) / p.tile.rows;
    for (; row < row_end; ++tile_row) {
      const int64_t tile_end = (tile_row + 1) * p.tile.rows - p.phase.row;
      const int64_t stop = tile_end < row_end ? tile_end : row_end;
      for (; row + kPatch <= stop; row += kPatch) {
        uint32_t words[kPatch][kWords];
        reader.read({0, kPatch}, words);
#pragma unroll
        for (int i = 0; i < kPatch; ++i) raise(words[i]);
      }
      for (; row < stop; ++row) {
        uint32_t words[1][kWords];
        reader.read({0, 1}, words);
        raise(words[0]);
      }
      raise_tiles();
      clear();
    }
  }

  TE_DIST_INLINE void run(const Params& p, int64_t block) {
    // Strips of whole tiles begin where the first tile does, before the matrix.
    const int64_t row_phase = kWhole ? p.phase.row : 0, col_phase = kWhole ? p.phase.col : 0;
    const int64_t col_blocks = (col_phase + p.extents.cols + kBlockCols - 1) / kBlockCols;
    const int64_t strip = block / col_blocks, row = strip * p.strip - row_phase, end = row + p.strip;
    TileAmax self{p};
    self.col = (block - strip * col_blocks) * kBlockCols + threadIdx.x * kPatch - col_phase;
    self.row = row > 0 ? row : 0;
    self.row_end = end < p.extents.rows ? end : p.extents.rows;
    self.tile_col = (p.phase.col + self.col) / p.tile.cols;
    self.last_tile_col = (p.phase.col + self.col + kPatch - 1) / p.tile.cols;
    self.cols = Inside::of(self.col, kPatch, p.extents.cols);
    self.clear();
    if constexpr (kWhole) {
      self.reduce_whole();
    } else {
      self.reduce();
    }
  }

  TE_DIST_INLINE void run(const Params& p) { run(p, blockIdx.x); }
};

}  // namespace te_dist::cuda
