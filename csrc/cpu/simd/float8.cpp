// FP8 with one scale for the tensor, or one for a tile of 128 or 128 x 128.
#include "../../numerics/scale.h"
#include "kernels_of_level.h"
#include "panel.h"
#include "parallel.h"
#include "transpose.h"

namespace te_dist::cpu::TE_DIST_ISA {
namespace {

constexpr int kTile = 128;
using Grid = PanelGrid<kTile, kTile>;
using Values = Panel<kTile, kTile>;
using Codes = CodePanel<kTile, kTile>;
using Tiles = TileGrid<kTile, kTile>;

void write_transposed(const Codes& codes, const Window& w, uint8_t* data, int64_t stride) {
  transpose_block(codes.row(w, 0), kTile, w.rows, w.cols, data + w.col * stride + w.row, stride);
}

float max_finite(DType dtype) {
  if (dtype == DType::kBFloat16) return 3.38953139e38f;
  return dtype == DType::kFloat16 ? 65504.0f : kFloatMax;
}

// Finds the scales of one direction, stores their inverses, and encodes the panel.
template <class Code>
void encode_direction(const Values& values, const Window& w, const FloatScaleRule& rule,
                      const BlockOutput<float>& output, Codes& codes) {
  const Tiles tiles(output.tile);
  alignas(64) float amax[Tiles::kMaxCount], multipliers[Tiles::kMaxCount], inverses[Tiles::kMaxCount];
  if (output.amax.data) {
    tiles.load_amax(output.amax, w, amax);
  } else {
    tiles.find_amax(values, amax);
  }
  for (int i = 0; i < tiles.count; ++i) {
    multipliers[i] = scale_from_amax(amax[i], rule);
    inverses[i] = 1.0f / multipliers[i];
  }
  tiles.for_each_cell(w, output.tile, [&](int tile, int64_t row, int64_t col) {
    output.scale.at(row, col) = inverses[tile];
  });
  codes.encode<Code>(values, tiles, multipliers);
}

bool same_codes(const BlockOutput<float>& row, const BlockOutput<float>& col) {
  return row.tile.rows == col.tile.rows && row.tile.cols == col.tile.cols && row.amax.data == col.amax.data;
}

template <class Code>
void quantize_block_panel(const QuantizeFloat8Block& op, const FloatScaleRule& rule, const Window& w) {
  Values values;
  Codes codes;
  values.load(op.x, w);
  if (op.row.data) {
    encode_direction<Code>(values, w, rule, op.row, codes);
    codes.write(w, op.row.data, op.x.cols);
  }
  if (op.col.data) {
    encode_direction<Code>(values, w, rule, op.col, codes);
    write_transposed(codes, w, op.col.data, op.x.rows);
  }
}

template <class Code>
void quantize_tensor_panel(const QuantizeFloat8Tensor& op, const Window& w) {
  Values values;
  Codes codes;
  values.load(op.x, w);
  codes.encode<Code>(values, Tiles({kTile, kTile}), &op.scale);
  if (op.row_data) codes.write(w, op.row_data, op.x.cols);
  if (op.col_data) write_transposed(codes, w, op.col_data, op.x.rows);
}

}  // namespace

void quantize_float8_block(const QuantizeFloat8Block& op, int threads) {
  with_fp8(op.fp8, [&](auto code) {
    using Code = decltype(code);
    const FloatScaleRule rule{float_of(Code::kClamp), op.eps, max_finite(op.x.dtype), op.pow2};
    const Grid grid(op.x, op.phase);
    parallel_for(grid.count(), threads,
                 [&](int64_t index) { quantize_block_panel<Code>(op, rule, grid.window(index)); });
  });
}

void quantize_float8_tensor(const QuantizeFloat8Tensor& op, int threads) {
  with_fp8(op.fp8, [&](auto code) {
    using Code = decltype(code);
    const Grid grid(op.x, {0, 0});
    parallel_for(grid.count(), threads, [&](int64_t index) { quantize_tensor_panel<Code>(op, grid.window(index)); });
  });
}

}  // namespace te_dist::cpu::TE_DIST_ISA
