// Largest magnitude of every tile. `out` is zero beforehand.
#pragma once

#include "common/source.cuh"

namespace te_dist::cuda {

// kLoad: bytes that can be read at a time. A thread walks down 8 columns of a strip of rows and hands in the magnitudes
// whenever a tile ends; lanes of a warp, side by side, that hold a part of the same tile hand in one.
template <class Source, int kLoad>
struct TileAmax {
  using Element = typename Source::Element;
  static constexpr int kThreads = 256;
  static constexpr int kBlocks = Element::kPerWord == 2 && kLoad >= 8 ? 4 : 2;
  static constexpr int kWords = kPatch / Element::kPerWord;
  static constexpr int kBlockCols = kThreads * kPatch;

  struct Params {
    typename Source::Params source;
    Extents extents;
    Phase phase;
    Extents tile;  // no larger than the matrix in a dimension without phase: one tile
    uint32_t* out;  // bits of magnitudes, whose order is that of the magnitudes
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

  // Most magnitudes are smaller than what is there already: reading is cheaper than an atomic that changes nothing.
  TE_DIST_DEVICE void raise_out(int64_t its_tile, float magnitude) const {
    if (!(magnitude > 0.0f)) return;
    uint32_t* out = p.out + tile_row * p.grid_cols + its_tile;
    if (__ldcg(out) < bits_of(magnitude)) atomicMax(out, bits_of(magnitude));
  }

  TE_DIST_DEVICE float column(int j) const {
    return Element::value(largest[j / Element::kPerWord], j % Element::kPerWord);
  }

  TE_DIST_DEVICE void end_tile() {
    const bool is_one = tile_col == last_tile_col;
    float magnitude = 0.0f;
#pragma unroll
    for (int j = 0; j < kPatch; ++j) magnitude = fmaxf(magnitude, column(j));
    hand_in(is_one ? magnitude : 0.0f);
    if (!is_one) {
#pragma unroll
      for (int j = 0; j < kPatch; ++j) {
        raise_out((p.phase.col + col + j) / p.tile.cols, column(j));
      }
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) largest[w] = 0;
  }

  TE_DIST_DEVICE void raise(const uint32_t (&words)[kWords]) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) largest[w] = Element::raise(largest[w], words[w]);
  }

  TE_DIST_DEVICE void reduce() {
    typename Source::template Reader<kLoad> reader(p.source, p.extents, row, col, cols);
    tile_row = (p.phase.row + row) / p.tile.rows;
    for (; row < row_end; ++tile_row) {
      const int64_t tile_end = (tile_row + 1) * p.tile.rows - p.phase.row;
      const int64_t stop = tile_end < row_end ? tile_end : row_end;
      for (; row + kPatch <= stop; row += kPatch) {
        uint32_t words[kPatch][kWords];
#pragma unroll
        for (int i = 0; i < kPatch; ++i) reader.read(true, words[i]);
#pragma unroll
        for (int i = 0; i < kPatch; ++i) raise(words[i]);
      }
      for (; row < stop; ++row) {
        uint32_t words[kWords];
        reader.read(true, words);
        raise(words);
      }
      end_tile();
    }
  }

  TE_DIST_INLINE void run(const Params& p, int64_t block) {
    const int64_t col_blocks = (p.extents.cols + kBlockCols - 1) / kBlockCols;
    const int64_t strip = block / col_blocks;
    TileAmax self{p};
    self.col = (block - strip * col_blocks) * kBlockCols + threadIdx.x * kPatch;
    self.row = strip * p.strip;
    self.row_end = self.row + p.strip < p.extents.rows ? self.row + p.strip : p.extents.rows;
    self.tile_col = (p.phase.col + self.col) / p.tile.cols;
    self.last_tile_col = (p.phase.col + self.col + kPatch - 1) / p.tile.cols;
    self.cols = Inside::of(self.col, kPatch, p.extents.cols);
#pragma unroll
    for (int w = 0; w < kWords; ++w) self.largest[w] = 0;
    self.reduce();
  }

  TE_DIST_INLINE void run(const Params& p) { run(p, blockIdx.x); }
};

}  // namespace te_dist::cuda
