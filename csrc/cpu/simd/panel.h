// Panels: the unit in which a matrix is quantized. A panel is as high as a tile and some tiles wide, aligned to tiles,
// and held as fp32 in a buffer that fits the cache. Where the matrix covers a part of a panel only (ragged edges, cuts
// through a tile), the rest is zeros, which change no amax and are not written.
#pragma once

#include <cstring>

#include "elements.h"

namespace te_dist::cpu::TE_DIST_ISA {

// The part of a panel that lies in the matrix.
struct Window {
  int64_t panel_row, panel_col;  // which panel
  int64_t row, col;              // its first element in the matrix
  int rows, cols;                // extents
  int row_offset, col_offset;    // where that element lies in the panel
};

template <int kRows, int kCols>
struct PanelGrid {
  Phase phase;
  int64_t rows, cols;              // of the matrix
  int64_t panel_rows, panel_cols;  // number of panels

  // Tiles are kRows long, so that a phase counts modulo kRows.
  PanelGrid(const Matrix& x, Phase phase_)
      : phase{phase_.row % kRows, phase_.col % kRows}, rows(x.rows), cols(x.cols),
        panel_rows((phase.row + x.rows + kRows - 1) / kRows), panel_cols((phase.col + x.cols + kCols - 1) / kCols) {}

  int64_t count() const { return rows && cols ? panel_rows * panel_cols : 0; }

  Window window(int64_t index) const {
    Window w{};
    w.panel_row = index / panel_cols;
    w.panel_col = index % panel_cols;
    clip(w.panel_row * kRows - phase.row, kRows, rows, &w.row, &w.rows, &w.row_offset);
    clip(w.panel_col * kCols - phase.col, kCols, cols, &w.col, &w.cols, &w.col_offset);
    return w;
  }

 private:
  static void clip(int64_t start, int length, int64_t extent, int64_t* first, int* count, int* offset) {
    const int64_t stop = start + length < extent ? start + length : extent;
    *first = start > 0 ? start : 0;
    *count = int(stop - *first);
    *offset = int(*first - start);
  }
};

template <int kRows, int kCols>
struct Panel {
  alignas(64) float values[kRows][kCols];

  void load(const Matrix& x, const Window& w) {
    if (w.rows < kRows || w.cols < kCols) std::memset(values, 0, sizeof values);
    with_element(x.dtype, [&](auto element) {
      using Element = decltype(element);
      const auto* source = static_cast<const typename Element::Storage*>(x.data) + w.row * x.cols + w.col;
      for (int r = 0; r < w.rows; ++r) {
        load_row<Element>(source + r * x.cols, w.cols, &values[w.row_offset + r][w.col_offset]);
      }
    });
  }
};

// Cells of a grid (tiles, or what one stored scale covers) along one dimension of a panel.
struct CellRange {
  int begin, end;      // cells of the panel that touch the window
  int64_t grid_begin;  // index of the first in the grid of the matrix
};

template <int kExtent>
static inline CellRange cell_range(int cell, int64_t panel, int64_t first, int count, int offset) {
  if (cell == 1) return {offset, offset + count, first};
  const int begin = offset / cell;
  return {begin, (offset + count + cell - 1) / cell, panel * (kExtent / cell) + begin};
}

// Tiles of a panel, as an array of (rows, cols) with one entry per tile. A tile's extents are 1 or kTile.
template <int kRows, int kCols>
struct TileGrid {
  int tile_rows, tile_cols;  // extents of a tile
  int cols;                  // tiles side by side in a panel
  int count;

  explicit TileGrid(Tile tile)
      : tile_rows(int(tile.rows)), tile_cols(int(tile.cols)), cols(kCols / tile_cols),
        count(cols * (kRows / tile_rows)) {}

  static constexpr int kMaxCount = kRows * kCols / 16;

  int index(int panel_row, int panel_col) const { return panel_row / tile_rows * cols + panel_col / tile_cols; }

  // Copies between `tiles` (this grid) and a plane with one value per `grain`, for what touches the window.
  template <class Copy>
  void for_each_cell(const Window& w, Tile grain, const Copy& copy) const {
    const int grain_rows = int(grain.rows), grain_cols = int(grain.cols);
    const CellRange r = cell_range<kRows>(grain_rows, w.panel_row, w.row, w.rows, w.row_offset);
    const CellRange c = cell_range<kCols>(grain_cols, w.panel_col, w.col, w.cols, w.col_offset);
    for (int i = r.begin; i < r.end; ++i) {
      for (int j = c.begin; j < c.end; ++j) {
        copy(index(i * grain_rows, j * grain_cols), r.grid_begin + i - r.begin, c.grid_begin + j - c.begin);
      }
    }
  }

  void load_amax(const Plane<const float>& plane, const Window& w, float* amax) const {
    for (int i = 0; i < count; ++i) amax[i] = 0.0f;
    for_each_cell(w, {tile_rows, tile_cols},
                  [&](int tile, int64_t row, int64_t col) { amax[tile] = plane.at(row, col); });
  }

  void find_amax(const Panel<kRows, kCols>& panel, float* amax) const {
    if (tile_rows == 1) {
      for (int r = 0; r < kRows; ++r) reduce_runs(panel.values[r], amax + r * cols);
      return;
    }
    alignas(64) float columns[kCols];
    reduce_columns(panel, columns);
    if (tile_cols == 1) {
      std::memcpy(amax, columns, sizeof columns);
    } else {
      reduce_runs(columns, amax);
    }
  }

  // One multiplier per element of a panel row, from one per tile.
  void expand(const float* tiles, float* elements) const {
    if (tile_cols == 1) {
      std::memcpy(elements, tiles, sizeof(float) * kCols);
      return;
    }
    for (int t = 0; t < cols; ++t) {
      for (int i = 0; i < kRows; ++i) elements[t * kRows + i] = tiles[t];
    }
  }

 private:
  // Tiles are kRows wide: a panel is one tile high, and tiles are runs of equal length in both directions.
  static void reduce_runs(const float* __restrict values, float* __restrict amax) {
    for (int t = 0; t < kCols / kRows; ++t) {
      uint32_t key = 0;
      for (int i = 0; i < kRows; ++i) {
        const uint32_t other = magnitude_key(values[t * kRows + i]);
        key = key > other ? key : other;
      }
      amax[t] = float_of(key);
    }
  }

  static void reduce_columns(const Panel<kRows, kCols>& panel, float* __restrict amax) {
    uint32_t keys[kCols] = {};
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kCols; ++c) {
        const uint32_t other = magnitude_key(panel.values[r][c]);
        keys[c] = keys[c] > other ? keys[c] : other;
      }
    }
    for (int c = 0; c < kCols; ++c) amax[c] = float_of(keys[c]);
  }
};

// Codes of a panel, one byte each.
template <int kRows, int kCols>
struct CodePanel {
  alignas(64) uint8_t codes[kRows][kCols];

  // Multipliers: one per tile.
  template <class Code>
  void encode(const Panel<kRows, kCols>& panel, const TileGrid<kRows, kCols>& tiles, const float* multipliers) {
    alignas(64) float row_multipliers[kCols];
    for (int r = 0; r < kRows; ++r) {
      if (r % tiles.tile_rows == 0) tiles.expand(multipliers + r / tiles.tile_rows * tiles.cols, row_multipliers);
      encode_row<Code>(panel.values[r], row_multipliers, codes[r]);
    }
  }

  template <class Code>
  static void encode_row(const float* __restrict values, const float* __restrict multipliers, uint8_t* __restrict out) {
    for (int c = 0; c < kCols; ++c) out[c] = uint8_t(Code::encode(values[c] * multipliers[c]));
  }

  // First code of the window's row `row`.
  const uint8_t* row(const Window& w, int row) const { return &codes[w.row_offset + row][w.col_offset]; }

  // Into a (rows, cols) matrix with `stride` codes a row.
  void write(const Window& w, uint8_t* data, int64_t stride) const {
    for (int r = 0; r < w.rows; ++r) std::memcpy(data + (w.row + r) * stride + w.col, row(w, r), size_t(w.cols));
  }
};

}  // namespace te_dist::cpu::TE_DIST_ISA
