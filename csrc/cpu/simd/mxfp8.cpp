// MXFP8: FP8 with a power-of-two scale byte for 32, or 32 x 32, values.
#include "../../numerics/scale.h"
#include "kernels_of_level.h"
#include "panel.h"
#include "parallel.h"

namespace te_dist::cpu::TE_DIST_ISA {
namespace {

constexpr int kTile = 32, kPanelCols = 256;
using Grid = PanelGrid<kTile, kPanelCols>;
using Values = Panel<kTile, kPanelCols>;
using Codes = CodePanel<kTile, kPanelCols>;
using Tiles = TileGrid<kTile, kPanelCols>;

template <class Code>
void quantize_direction(const Values& values, const Window& w, const BlockOutput<uint8_t>& output, Tile grain,
                        int64_t stride) {
  const Tiles tiles(output.tile);
  alignas(64) float amax[Tiles::kMaxCount], multipliers[Tiles::kMaxCount];
  alignas(64) uint8_t exponents[Tiles::kMaxCount];
  if (output.amax.data) {
    tiles.load_amax(output.amax, w, amax);
  } else {
    tiles.find_amax(values, amax);
  }
  const float reciprocal = float_of(Code::kShift == E4M3::kShift ? kReciprocalOfE4M3Max : kReciprocalOfE5M2Max);
  for (int i = 0; i < tiles.count; ++i) {
    const uint32_t exponent = e8m0_round_up(amax[i] * reciprocal);
    exponents[i] = uint8_t(exponent);
    multipliers[i] = e8m0_inverse(exponent);
  }
  tiles.for_each_cell(w, grain, [&](int tile, int64_t row, int64_t col) {
    output.scale.at(row, col) = exponents[tile];
  });
  Codes codes;
  codes.encode<Code>(values, tiles, multipliers);
  codes.write(w, output.data, stride);
}

}  // namespace

void quantize_mxfp8(const QuantizeMxFp8& op, int threads) {
  with_fp8(op.fp8, [&](auto code) {
    using Code = decltype(code);
    const Grid grid(op.x, op.phase);
    parallel_for(grid.count(), threads, [&](int64_t index) {
      const Window w = grid.window(index);
      Values values;
      values.load(op.x, w);
      if (op.row.data) quantize_direction<Code>(values, w, op.row, {1, kTile}, op.x.cols);
      if (op.col.data) quantize_direction<Code>(values, w, op.col, {kTile, 1}, op.x.cols);
    });
  });
}

}  // namespace te_dist::cpu::TE_DIST_ISA
