// Panels: the unit in which a matrix is quantized. A panel is as high as a tile and some tiles wide, aligned to tiles,
// and held in a buffer that fits the cache. Where the matrix covers a part of a panel only (ragged edges, cuts through
// a tile), the rest is zeros, which change no amax and are not written.
#pragma once

#include <cstring>

#include "encode.h"
#include "source.h"

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
  PanelGrid(const Source& x, Phase phase_)
      : phase{phase_.row % kRows, phase_.col % kRows},
        rows(x.rows),
        cols(x.cols),
        panel_rows((phase.row + x.rows + kRows - 1) / kRows),
        panel_cols((phase.col + x.cols + kCols - 1) / kCols) {}

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

template <class Element_, int kRows, int kCols>
struct Panel {
  using Element = Element_;
  using Storage = typename Element::Storage;
  alignas(64) Storage elements[kRows][kCols];

  const Storage* row(int r) const { return elements[r]; }

  void load(const Source& x, const Window& w) {
    if (w.rows < kRows || w.cols < kCols) std::memset(elements, 0, sizeof elements);
    for (int r = 0; r < w.rows; ++r) {
      Storage* target = &elements[w.row_offset + r][w.col_offset];
      read_row<Element>(x, w.row + r, w.col, w.cols == kCols ? kCols : w.cols, target);
    }
  }
};

// Fetches a panel's rows ahead of time, a row whenever the caller has done a row's work.
struct PanelPrefetch {
  const char* first = nullptr;
  int64_t stride = 0;  // bytes
  int rows = 0, bytes = 0;

  void row(int r) const {
    if (r >= rows) return;
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(first + r * stride + i);
  }
};

template <class Grid>
static inline PanelPrefetch prefetch_of(const Grid& grid, const Source& x, int itemsize, int64_t index) {
  if (index >= grid.count() || !x.is_plain()) return {};
  const Window w = grid.window(index);
  const char* first = static_cast<const char*>(x.data) + (w.row * x.cols + w.col) * itemsize;
  return {first, x.cols * itemsize, w.rows, w.cols * itemsize};
}

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
      : tile_rows(int(tile.rows)),
        tile_cols(int(tile.cols)),
        cols(kCols / tile_cols),
        count(cols * (kRows / tile_rows)) {}

  static constexpr int kMaxCount = kRows * kCols / 16;

  // copy(tile, row, col) for what touches the window of a plane with one value per `grain`, a part of a tile.
  template <class Copy>
  void for_each_cell(const Window& w, Tile grain, const Copy& copy) const {
    const int grain_rows = int(grain.rows), grain_cols = int(grain.cols);
    const CellRange r = cell_range<kRows>(grain_rows, w.panel_row, w.row, w.rows, w.row_offset);
    const CellRange c = cell_range<kCols>(grain_cols, w.panel_col, w.col, w.cols, w.col_offset);
    const int cells_per_tile = __builtin_ctz(unsigned(tile_cols / grain_cols));  // as a power of two
    for (int i = r.begin; i < r.end; ++i) {
      const int first_tile = i * grain_rows / tile_rows * cols;
      const int64_t row = r.grid_begin + i - r.begin;
      for (int j = c.begin; j < c.end; ++j) {
        copy(first_tile + (j >> cells_per_tile), row, c.grid_begin + j - c.begin);
      }
    }
  }

  void load_amax(const Plane<const float>& plane, const Window& w, float* amax) const {
    for (int i = 0; i < count; ++i) amax[i] = 0.0f;
    for_each_cell(w, {tile_rows, tile_cols},
                  [&](int tile, int64_t row, int64_t col) { amax[tile] = plane.at(row, col); });
  }

  // NaN left out. Says whether all elements of the panel are finite.
  template <class Panel>
  bool find_amax(const Panel& panel, float* amax) const {
    using Element = typename Panel::Element;
    if (tile_rows == 1) return find_run_amax(panel, amax);
    alignas(64) typename Element::Key keys[kCols] = {};
    for (int r = 0; r < kRows; ++r) raise_keys<Element>(panel.elements[r], kCols, keys);
    const bool finite = largest_of_row(keys) < Element::kNotFinite;
    if (!finite) {
      std::memset(keys, 0, sizeof keys);
      for (int r = 0; r < kRows; ++r) raise_finite_keys<Element>(panel.elements[r], kCols, keys);
    }
    for (int t = 0; t < cols; ++t) {
      typename Element::Key key = 0;
      for (int i = 0; i < tile_cols; ++i) key = larger(key, keys[t * tile_cols + i]);
      amax[t] = Element::magnitude_of(key);
    }
    return finite;
  }

  // One multiplier per element of a panel row, from one per tile.
  void expand(const float* tiles, float* elements) const {
    if (tile_cols == 1) {
      std::memcpy(elements, tiles, sizeof(float) * kCols);
      return;
    }
    // A step never straddles two tiles of 32 and more: the order inside one does not matter.
    for (int t = 0; t < cols; ++t) {
      for (int i = 0; i < kRows; ++i) elements[t * kRows + i] = tiles[t];
    }
  }

 private:
  // Tiles are kRows wide: a panel is one tile high, and tiles are runs of equal length in both directions.
  template <class Panel>
  bool find_run_amax(const Panel& panel, float* amax) const {
    bool all_finite = true;
    for (int r = 0; r < kRows; ++r) {
      for (int t = 0; t < cols; ++t) {
        bool finite;
        amax[r * cols + t] = run_amax<typename Panel::Element, kRows>(&panel.elements[r][t * kRows], &finite);
        all_finite &= finite;
      }
    }
    return all_finite;
  }

  template <class Key>
  static Key largest_of_row(const Key* keys) {
    Key key = 0;
    for (int i = 0; i < kCols; ++i) key = larger(key, keys[i]);
    return key;
  }
};

// What elements are multiplied by: one value for each tile of a panel.
struct TileMultipliers {
  const float* values;
  bool trusted;  // see encode_row
  bool powers_of_two;
};

// Codes of a panel, one byte each.
template <int kRows, int kCols>
struct CodePanel {
  alignas(64) uint8_t codes[kRows][kCols];

  // FP8 codes. Meanwhile fetches what is needed `next`.
  template <class Code, class Panel>
  void encode(const Panel& panel, const TileGrid<kRows, kCols>& tiles, const TileMultipliers& multipliers,
              const PanelPrefetch& next) {
    using Element = typename Panel::Element;
    alignas(64) float of_elements[kCols];
    if (multipliers.powers_of_two && multipliers.trusted && tiles.tile_rows == kRows) {
      if constexpr (Element::interleaved) return encode_by_powers<Code>(panel, tiles, multipliers, next);
    }
    for (int r = 0; r < kRows; ++r) {
      if (r % tiles.tile_rows == 0) {
        tiles.expand(multipliers.values + r / tiles.tile_rows * tiles.cols, of_elements);
        if (tiles.tile_cols == 1) order_as_steps<Element>(of_elements, kCols);
      }
      next.row(r);
      const LaneMultipliers lanes{of_elements};
      if (multipliers.trusted) {
        encode_row<Element, Code, true>(panel.row(r), kCols, lanes, codes[r]);
      } else {
        encode_row<Element, Code, false>(panel.row(r), kCols, lanes, codes[r]);
      }
    }
  }

  // First code of the window's row `row`.
  const uint8_t* row(const Window& w, int row) const { return &codes[w.row_offset + row][w.col_offset]; }

  // Into a (rows, cols) matrix with `stride` codes a row; past the caches where whole vectors fit.
  void write(const Window& w, uint8_t* data, int64_t stride) const {
    const uint8_t* first = row(w, 0);
    uint8_t* out = data + w.row * stride + w.col;
    const bool whole =
        w.cols == kCols && reinterpret_cast<uintptr_t>(out) % kVectorBytes == 0 && stride % kVectorBytes == 0;
    for (int r = 0; r < w.rows; ++r, first += kCols, out += stride) {
      if (whole) {
        for (int i = 0; i < kCols; i += kVectorBytes) stream(out + i, load<VectorOf<uint8_t, kVectorBytes>>(first + i));
      } else {
        std::memcpy(out, first, size_t(w.cols));
      }
    }
  }

 private:
  // Rows in which a code is subnormal are done again the long way.
  template <class Code, class Panel>
  void encode_by_powers(const Panel& panel, const TileGrid<kRows, kCols>& tiles, const TileMultipliers& multipliers,
                        const PanelPrefetch& next) {
    using Element = typename Panel::Element;
    alignas(64) float of_elements[kCols];
    PowerRow<Code, kCols> powers;
    tiles.expand(multipliers.values, of_elements);
    const bool usable = powers.prepare(of_elements);
    order_as_steps<Element>(of_elements, kCols);
    for (int r = 0; r < kRows; ++r) {
      next.row(r);
      if (usable && powers.encode(panel.row(r), codes[r])) continue;
      encode_row<Element, Code, true>(panel.row(r), kCols, LaneMultipliers{of_elements}, codes[r]);
    }
  }
};

}  // namespace te_dist::cpu::TE_DIST_ISA
