// MXFP8: FP8 with a power-of-two scale byte for 32, or 32 x 32, values.
#include "../../numerics/scale.h"
#include "apply.h"
#include "kernels_of_level.h"
#include "panel.h"
#include "parallel.h"

namespace te_dist::cpu::TE_DIST_ISA {
namespace {

constexpr int kTile = 32, kPanelCols = 256;
using Grid = PanelGrid<kTile, kPanelCols>;
using Codes = CodePanel<kTile, kPanelCols>;
using Tiles = TileGrid<kTile, kPanelCols>;

template <class Code, class Values>
void quantize_direction(const Values& values, const Window& w, const BlockOutput<uint8_t>& output, Tile grain,
                        const PanelPrefetch& next, int64_t stride) {
  const Tiles tiles(output.tile);
  alignas(64) float amax[Tiles::kMaxCount] = {}, multipliers[Tiles::kMaxCount];
  alignas(64) uint32_t exponents[Tiles::kMaxCount];
  bool trusted = false;
  if (output.amax.data) {
    tiles.load_amax(output.amax, w, amax);
  } else {
    trusted = tiles.find_amax(values, amax);
  }
  const float reciprocal = float_of(Code::kShift == E4M3::kShift ? kReciprocalOfE4M3Max : kReciprocalOfE5M2Max);
  apply(amax, tiles.count, [&](int i, F32 tile_amax) {
    const U32 exponent = e8m0_round_up(tile_amax * reciprocal);
    store(exponents + i, exponent);
    store(multipliers + i, e8m0_inverse(exponent));
  });
  tiles.for_each_cell(
      w, grain, [&](int tile, int64_t row, int64_t col) { output.scale.at(row, col) = uint8_t(exponents[tile]); });
  Codes codes;
  codes.template encode<Code>(values, tiles, {multipliers, trusted, true}, next);
  codes.write(w, output.data, stride);
}

}  // namespace

void quantize_mxfp8(const QuantizeMxFp8& op, int threads) {
  with_element(op.x.dtype, [&](auto element) {
    using Element = decltype(element);
    with_fp8(op.fp8, [&](auto code) {
      using Code = decltype(code);
      const Grid grid(op.x, op.phase);
      parallel_for(grid.count(), threads, [&](int64_t index) {
        const Window w = grid.window(index);
        Panel<Element, kTile, kPanelCols> values;
        const PanelPrefetch next = prefetch_of(grid, op.x, sizeof(typename Element::Storage), index + 1);
        values.load(op.x, w);
        if (op.row.data) quantize_direction<Code>(values, w, op.row, {1, kTile}, next, op.x.cols);
        if (op.col.data) quantize_direction<Code>(values, w, op.col, {kTile, 1}, {}, op.x.cols);
      });
    });
  });
}

}  // namespace te_dist::cpu::TE_DIST_ISA
