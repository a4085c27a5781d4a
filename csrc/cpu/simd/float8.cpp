// FP8 with one scale for the tensor, or one for a tile of 128 or 128 x 128.
#include "../../numerics/scale.h"
#include "apply.h"
#include "float8_strips.h"
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

void scales_from_amax(const float* amax, int count, const FloatScaleRule& rule, TileScales& scales) {
  apply(amax, count, [&](int i, F32 tile_amax) {
    const F32 scale = scale_from_amax(tile_amax, rule);
    store(scales.multipliers + i, scale);
    store(scales.inverses + i, 1.0f / scale);
  });
}

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
  scales_from_amax(amax, tiles.count, rule, scales);
}

void store_scales(const TileScales& scales, const Window& w, const BlockOutput<float>& output) {
  Tiles(output.tile).for_each_cell(w, output.tile, [&](int tile, int64_t row, int64_t col) {
    output.scale.at(row, col) = scales.inverses[tile];
  });
}

// Whether both directions hold the same codes: square tiles, scaled alike.
bool same_codes(const BlockOutput<float>& row, const BlockOutput<float>& col) {
  return row.data && row.tile.rows == col.tile.rows && row.tile.cols == col.tile.cols && row.amax.data == col.amax.data;
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
    codes.template encode<Code>(values, Tiles(op.row.tile), {scales.multipliers, scales.trusted, rule.pow2}, next);
    codes.write(w, op.row.data, op.x.cols);
  }
  if (op.col.data) {
    if (!same_codes(op.row, op.col)) {
      find_scales(values, w, rule, op.col, scales);
      codes.template encode<Code>(values, Tiles(op.col.tile), {scales.multipliers, scales.trusted, rule.pow2},
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

// 128 columns of a strip whose rows are done.
template <class Element, class Code>
void quantize_strip_columns(const QuantizeFloat8Block& op, const FloatScaleRule& rule, const Window& w,
                            const Strip<Element>& strip, int run) {
  const Tiles tiles({kTile, 1});
  alignas(64) float amax[kTile];
  Codes codes;
  TileScales scales;
  if (op.col.amax.data) {
    tiles.load_amax(op.col.amax, w, amax);
    scales.trusted = false;
  } else {
    scales.trusted = column_amaxes(strip, run, amax);
  }
  scales_from_amax(amax, kTile, rule, scales);
  store_scales(scales, w, op.col);
  codes.template encode<Code>(strip.columns(run), tiles, {scales.multipliers, scales.trusted, rule.pow2}, {});
  write_transposed(codes, w, op.col.data, op.x.rows);
}

template <class Element, class Code>
void quantize_strips(const QuantizeFloat8Block& op, const FloatScaleRule& rule, int threads) {
  const Grid panels(op.x, op.phase);
  const PanelGrid<kTile, kStripCols> strips(op.x, {op.phase.row % kTile, op.phase.col % kTile});
  parallel_for(strips.count(), threads, [&](int64_t index) {
    Strip<Element> strip;
    const StripWindow window{op, strips.window(index)};
    quantize_strip_rows<Element, Code>(window, rule, strip);
    for (int run = window.first_run(); run <= window.last_run(); ++run) {
      const int64_t panel = window.w.panel_row * panels.panel_cols + window.matrix_run(run);
      quantize_strip_columns<Element, Code>(op, rule, panels.window(panel), strip, run);
    }
  });
}

template <class Element, class Code>
void quantize_tensor_panel(const QuantizeFloat8Tensor& op, const Window& w, const PanelPrefetch& next) {
  Panel<Element, kTile, kTile> values;
  Codes codes;
  values.load(op.x, w);
  codes.template encode<Code>(values, Tiles({kTile, kTile}), {&op.scale, false, false}, next);
  if (op.row_data) codes.write(w, op.row_data, op.x.cols);
  if (op.col_data) write_transposed(codes, w, op.col_data, op.x.rows);
}

// Rowwise only: where rows begin and end does not matter.
template <class Element, class Code>
void quantize_flat(const QuantizeFloat8Tensor& op, int threads) {
  using Storage = typename Element::Storage;
  constexpr int64_t kChunk = 16384;
  const auto* source = static_cast<const Storage*>(op.x.data);
  const int64_t count = op.x.rows * op.x.cols, whole = count / kStep * kStep;
  const OneMultiplier multiplier(op.scale);
  const bool streamed = reinterpret_cast<uintptr_t>(op.row_data) % kVectorBytes == 0 && count >= kStreamedBytes;
  parallel_for((whole + kChunk - 1) / kChunk, threads, [&](int64_t index) {
    const int64_t first = index * kChunk;
    const int length = int(whole - first < kChunk ? whole - first : kChunk);
    if (streamed) {
      encode_row<Element, Code, false, Streamed>(source + first, length, multiplier, op.row_data + first);
    } else {
      encode_row<Element, Code, false, Cached>(source + first, length, multiplier, op.row_data + first);
    }
  });
  if (whole == count) return;
  Storage padded[kStep] = {};
  uint8_t codes[kStep];
  std::memcpy(padded, source + whole, sizeof(Storage) * size_t(count - whole));
  encode_row<Element, Code, false>(padded, kStep, multiplier, codes);
  std::memcpy(op.row_data + whole, codes, size_t(count - whole));
}

}  // namespace

void quantize_float8_block(const QuantizeFloat8Block& op, int threads) {
  with_element(op.x.dtype, [&](auto element) {
    using Element = decltype(element);
    with_fp8(op.fp8, [&](auto code) {
      using Code = decltype(code);
      const FloatScaleRule rule{float_of(Code::kClamp), op.eps, max_finite(op.x.dtype), op.pow2};
      const bool runs_of_rows = op.row.data && op.row.tile.rows == 1,
                 runs_of_cols = op.col.data && op.col.tile.cols == 1;
      if (runs_of_rows && !op.col.data && op.x.is_plain()) return quantize_rows<Element, Code>(op, rule, threads);
      if (runs_of_rows && runs_of_cols) return quantize_strips<Element, Code>(op, rule, threads);
      quantize_panels<Element, Code>(op, rule, threads);
    });
  });
}

void quantize_float8_tensor(const QuantizeFloat8Tensor& op, int threads) {
  with_element(op.x.dtype, [&](auto element) {
    using Element = decltype(element);
    with_fp8(op.fp8, [&](auto code) {
      if (!op.col_data && op.x.is_plain()) return quantize_flat<Element, decltype(code)>(op, threads);
      const Grid grid(op.x, {0, 0});
      parallel_for(grid.count(), threads, [&](int64_t index) {
        const PanelPrefetch next = prefetch_of(grid, op.x, sizeof(typename Element::Storage), index + 1);
        quantize_tensor_panel<Element, decltype(code)>(op, grid.window(index), next);
      });
    });
  });
}

}  // namespace te_dist::cpu::TE_DIST_ISA
