// FP8 with one scale for the tensor, or one for a tile of 128 or 128 x 128.
#include "../../numerics/scale.h"
#include "apply.h"
#include "float8_rows.h"
#include "kernels_of_level.h"
#include "panel.h"
#include "parallel.h"
#include "transpose.h"

namespace te_dist::cpu::TE_DIST_ISA {
namespace {

constexpr int kTile = 128;
using Grid = PanelGrid<kTile, kTile>;
using Codes = CodePanel<kTile, kTile>;
using Tiles = TileGrid<kTile, kTile>;

void write_transposed(const Codes& codes, const Window& w, uint8_t* data, int64_t stride) {
  transpose_block<uint8_t, true>(codes.row(w, 0), kTile, w.rows, w.cols, data + w.col * stride + w.row, stride);
}

float max_finite(DType dtype) {
  if (dtype == DType::kBFloat16) return 3.38953139e38f;
  return dtype == DType::kFloat16 ? 65504.0f : kFloatMax;
}

// Scales of the tiles of a panel in one direction.
struct TileScales {
  alignas(64) float multipliers[Tiles::kMaxCount];
  alignas(64) float inverses[Tiles::kMaxCount];
  bool trusted;  // see encode_row
};

template <class Values>
void find_scales(const Values& values, const Window& w, const FloatScaleRule& rule, const BlockOutput<float>& output,
                 TileScales& scales) {
  const Tiles tiles(output.tile);
  alignas(64) float amax[Tiles::kMaxCount] = {};
  scales.trusted = false;
  if (output.amax.data) {
    tiles.load_amax(output.amax, w, amax);
  } else {
    scales.trusted = tiles.find_amax(values, amax);
  }
  apply(amax, tiles.count, [&](int i, F32 tile_amax) {
    const F32 scale = scale_from_amax(tile_amax, rule);
    store(scales.multipliers + i, scale);
    store(scales.inverses + i, 1.0f / scale);
  });
}

void store_scales(const TileScales& scales, const Window& w, const BlockOutput<float>& output) {
  Tiles(output.tile).for_each_cell(w, output.tile, [&](int tile, int64_t row, int64_t col) {
    output.scale.at(row, col) = scales.inverses[tile];
  });
}

// Whether both directions hold the same codes: square tiles, scaled alike.
bool same_codes(const BlockOutput<float>& row, const BlockOutput<float>& col) {
  return row.data && row.tile.rows == col.tile.rows && row.tile.cols == col.tile.cols &&
         row.amax.data == col.amax.data;
}

template <class Element, class Code>
void quantize_block_panel(const QuantizeFloat8Block& op, const FloatScaleRule& rule, const Window& w,
                          const PanelPrefetch& next) {
  Panel<Element, kTile, kTile> values;
  Codes codes;
  TileScales scales;
  values.load(op.x, w);
  if (op.row.data) {
    find_scales(values, w, rule, op.row, scales);
    store_scales(scales, w, op.row);
    codes.template encode<Code>(values, Tiles(op.row.tile), scales.multipliers, scales.trusted, next);
    codes.write(w, op.row.data, op.x.cols);
  }
  if (op.col.data) {
    if (!same_codes(op.row, op.col)) {
      find_scales(values, w, rule, op.col, scales);
      codes.template encode<Code>(values, Tiles(op.col.tile), scales.multipliers, scales.trusted,
                                  op.row.data ? PanelPrefetch{} : next);
    }
    store_scales(scales, w, op.col);
    write_transposed(codes, w, op.col.data, op.x.rows);
  }
}

template <class Element, class Code>
void quantize_panels(const QuantizeFloat8Block& op, const FloatScaleRule& rule, int threads) {
  const Grid grid(op.x, op.phase);
  parallel_for(grid.count(), threads, [&](int64_t index) {
    const PanelPrefetch next = prefetch_of(grid, op.x, sizeof(typename Element::Storage), index + 1);
    quantize_block_panel<Element, Code>(op, rule, grid.window(index), next);
  });
}

// Runs along both dimensions: strips of one tile's height, small enough to stay in the cache, are read row by row from
// memory, and then again panel by panel.
template <class Element, class Code>
void quantize_strips(const QuantizeFloat8Block& op, const FloatScaleRule& rule, int threads) {
  constexpr int kStripPanels = 16;
  using Strips = PanelGrid<kTile, kStripPanels * kTile>;
  const Grid panels(op.x, op.phase);
  // The grid of strips starts where that of panels does: inside the first tile.
  const Strips strips(op.x, {op.phase.row % kTile, op.phase.col % kTile});
  QuantizeFloat8Block columnwise = op;
  columnwise.row.data = nullptr;
  parallel_for(strips.count(), threads, [&](int64_t index) {
    const Window strip = strips.window(index);
    const int64_t first_panel = strip.panel_col * kStripPanels;
    quantize_rows<Element, Code>(op, rule, strip.row, strip.rows, {strip.col, strip.cols, first_panel, false});
    for (int64_t col = first_panel; col < first_panel + kStripPanels && col < panels.panel_cols; ++col) {
      const int64_t panel = strip.panel_row * panels.panel_cols + col;
      quantize_block_panel<Element, Code>(columnwise, rule, panels.window(panel), {});
    }
  });
}

template <class Element, class Code>
void quantize_tensor_panel(const QuantizeFloat8Tensor& op, const Window& w, const PanelPrefetch& next) {
  Panel<Element, kTile, kTile> values;
  Codes codes;
  values.load(op.x, w);
  codes.template encode<Code>(values, Tiles({kTile, kTile}), &op.scale, false, next);
  if (op.row_data) codes.write(w, op.row_data, op.x.cols);
  if (op.col_data) write_transposed(codes, w, op.col_data, op.x.rows);
}

}  // namespace

void quantize_float8_block(const QuantizeFloat8Block& op, int threads) {
  with_element(op.x.dtype, [&](auto element) {
    using Element = decltype(element);
    with_fp8(op.fp8, [&](auto code) {
      using Code = decltype(code);
      const FloatScaleRule rule{float_of(Code::kClamp), op.eps, max_finite(op.x.dtype), op.pow2};
      if (!op.row.data || op.row.tile.rows != 1) return quantize_panels<Element, Code>(op, rule, threads);
      if (op.col.data) return quantize_strips<Element, Code>(op, rule, threads);
      parallel_for(op.x.rows, threads, [&](int64_t row) {
        quantize_rows<Element, Code>(op, rule, row, 1, {0, op.x.cols, 0, true});
      });
    });
  });
}

void quantize_float8_tensor(const QuantizeFloat8Tensor& op, int threads) {
  with_element(op.x.dtype, [&](auto element) {
    using Element = decltype(element);
    with_fp8(op.fp8, [&](auto code) {
      const Grid grid(op.x, {0, 0});
      parallel_for(grid.count(), threads, [&](int64_t index) {
        const PanelPrefetch next = prefetch_of(grid, op.x, sizeof(typename Element::Storage), index + 1);
        quantize_tensor_panel<Element, decltype(code)>(op, grid.window(index), next);
      });
    });
  });
}

}  // namespace te_dist::cpu::TE_DIST_ISA
