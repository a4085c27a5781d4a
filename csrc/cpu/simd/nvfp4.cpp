// NVFP4: 4-bit codes with an e4m3 scale byte for 16, or 16 x 16, values below one amax for the tensor (or for each row).
#include "../../numerics/philox.h"
#include "../../numerics/scale.h"
#include "kernels_of_level.h"
#include "panel.h"
#include "parallel.h"
#include "transpose.h"

namespace te_dist::cpu::TE_DIST_ISA {
namespace {

constexpr int kTile = 16, kPanelCols = 512;
using Grid = PanelGrid<kTile, kPanelCols>;
using Values = Panel<kTile, kPanelCols>;
using Codes = CodePanel<kTile, kPanelCols>;
using Tiles = TileGrid<kTile, kPanelCols>;
using Noise = CodePanel<kTile, kPanelCols>;

// Scale bytes of the tiles of a panel, and what elements are multiplied by.
struct TileScales {
  alignas(64) float tensor_amax[kTile];   // of each row of the panel
  alignas(64) float tensor_scale[kTile];  // from it
  alignas(64) uint8_t codes[Tiles::kMaxCount];
  alignas(64) float multipliers[Tiles::kMaxCount];
};

void load_tensor_amax(const Plane<const float>& amax, const Window& w, int e4m3_max, TileScales& scales) {
  for (int r = 0; r < kTile; ++r) {
    const bool inside = r >= w.row_offset && r < w.row_offset + w.rows;
    scales.tensor_amax[r] = inside ? amax.at(w.row + r - w.row_offset, 0) : 0.0f;
    scales.tensor_scale[r] = nvfp4_tensor_scale(scales.tensor_amax[r], float(e4m3_max));
  }
}

// A tile's first row inside the window: the row whose tensor amax it is scaled by.
int row_of_tile(const Tiles& tiles, const Window& w, int tile) {
  return tiles.tile_rows == 1 ? tile / tiles.cols : w.row_offset;
}

void find_scales(const Tiles& tiles, const Window& w, const float* amax, TileScales& scales) {
  const int tile_rows = tiles.count / tiles.cols;
  for (int r = 0; r < tile_rows; ++r) {
    const float tensor_scale = scales.tensor_scale[row_of_tile(tiles, w, r * tiles.cols)];
    for (int i = r * tiles.cols; i < (r + 1) * tiles.cols; ++i) {
      scales.codes[i] = uint8_t(nvfp4_block_code(amax[i], tensor_scale));
      scales.multipliers[i] = nvfp4_block_multiplier(scales.codes[i], tensor_scale);
    }
  }
}

// The elements of one tile that lie in the window: first element, extents.
struct TileWindow {
  int row, col, rows, cols;
};

TileWindow tile_window(const Tiles& tiles, const Window& w, int tile) {
  const int row = tile / tiles.cols * tiles.tile_rows, col = tile % tiles.cols * tiles.tile_cols;
  const int top = row > w.row_offset ? row : w.row_offset, left = col > w.col_offset ? col : w.col_offset;
  const int bottom = row + tiles.tile_rows < w.row_offset + w.rows ? row + tiles.tile_rows : w.row_offset + w.rows;
  const int right = col + tiles.tile_cols < w.col_offset + w.cols ? col + tiles.tile_cols : w.col_offset + w.cols;
  return {top, left, bottom - top, right - left};
}

// One of the two ways to scale a tile.
struct Candidate {
  uint32_t code;
  float multiplier, block_scale, tensor_amax, e4m3_max;
  FourOverSix norm;
};

// Error of a tile under one scale byte, in fp32: every row from left to right, then rows of a square folded in halves. A
// run along rows is summed from top to bottom. This order is part of the definition.
float candidate_error(const Values& values, const Tiles& tiles, const TileWindow& t, const Candidate& candidate) {
  float rows[kTile] = {};
  for (int r = t.row; r < t.row + t.rows; ++r) {
    for (int c = t.col; c < t.col + t.cols; ++c) {
      const float value = values.values[r][c];
      const float error = nvfp4_decode_error(E2M1::encode(value * candidate.multiplier), candidate.block_scale,
                                             candidate.tensor_amax, candidate.e4m3_max, value);
      const bool squared = candidate.norm == FourOverSix::kMeanSquare;
      rows[r] += squared ? error * error : float_of(bits_of(error) & kMagnitudeMask);
    }
  }
  if (tiles.tile_rows == 1) return rows[t.row];
  if (tiles.tile_cols == 1) {
    float sum = rows[0];
    for (int r = 1; r < kTile; ++r) sum += rows[r];
    return sum;
  }
  for (int half = kTile / 2; half > 0; half /= 2) {
    for (int r = 0; r < half; ++r) rows[r] += rows[r + half];
  }
  return rows[0];
}

// For every tile, whether its largest value becomes 6 or 4: whichever loses less; 6 where they tie.
void find_scales_four_over_six(const Tiles& tiles, const Window& w, const Values& values, const QuantizeNvFp4& op,
                               const float* amax, TileScales& scales) {
  for (int i = 0; i < tiles.count; ++i) {
    const TileWindow t = tile_window(tiles, w, i);
    const int row = row_of_tile(tiles, w, i);
    Candidate candidates[2];
    float errors[2];
    for (int c = 0; c < 2; ++c) {
      Candidate& candidate = candidates[c];
      candidate.code = nvfp4_four_over_six_code(amax[i], scales.tensor_scale[row], c ? 1.5f : 1.0f);
      candidate.multiplier = nvfp4_block_multiplier(candidate.code, scales.tensor_scale[row]);
      candidate.block_scale = E4M3::decode(candidate.code);
      candidate.tensor_amax = scales.tensor_amax[row];
      candidate.e4m3_max = float(op.e4m3_max);
      candidate.norm = op.four_over_six;
      errors[c] = candidate_error(values, tiles, t, candidate);
    }
    const Candidate& chosen = candidates[errors[1] < errors[0]];
    scales.codes[i] = uint8_t(chosen.code);
    scales.multipliers[i] = chosen.multiplier;
  }
}

// Random bytes of the window's elements: element i of the matrix takes byte i % 16 of block i / 16 of the stream.
void draw_noise(const PhiloxState& state, const Window& w, int64_t stride, Noise& noise) {
  for (int r = 0; r < w.rows; ++r) {
    const uint64_t first = uint64_t((w.row + r) * stride + w.col), last = first + uint64_t(w.cols) - 1;
    alignas(64) uint32_t words[(kPanelCols / 16 + 1) * 4];
    const int blocks = int(last / 16 - first / 16) + 1;
    for (int b = 0; b < blocks; ++b) {
      const PhiloxBlock block = philox4x32(state, first / 16 + uint64_t(b));
      for (int i = 0; i < 4; ++i) words[4 * b + i] = block.words[i];
    }
    uint8_t bytes[sizeof words];
    for (int i = 0; i < blocks * 16; ++i) bytes[i] = uint8_t(words[i / 4] >> (8 * (i % 4)));
    std::memcpy(&noise.codes[w.row_offset + r][w.col_offset], bytes + first % 16, size_t(w.cols));
  }
}

void encode_stochastic(const Values& values, const Tiles& tiles, const float* multipliers, const Noise& noise,
                       Codes& codes) {
  alignas(64) float row_multipliers[kPanelCols];
  for (int r = 0; r < kTile; ++r) {
    if (r % tiles.tile_rows == 0) tiles.expand(multipliers + r / tiles.tile_rows * tiles.cols, row_multipliers);
    for (int c = 0; c < kPanelCols; ++c) {
      codes.codes[r][c] = uint8_t(encode_e2m1_stochastic(values.values[r][c] * row_multipliers[c], noise.codes[r][c]));
    }
  }
}

void encode_direction(const QuantizeNvFp4& op, const Values& values, const Window& w, const Noise& noise,
                      const BlockOutput<uint8_t>& output, Tile grain, Codes& codes, TileScales& scales) {
  const Tiles tiles(output.tile);
  alignas(64) float amax[Tiles::kMaxCount];
  if (output.amax.data) {
    tiles.load_amax(output.amax, w, amax);
  } else {
    tiles.find_amax(values, amax);
  }
  if (op.four_over_six == FourOverSix::kNone) {
    find_scales(tiles, w, amax, scales);
  } else {
    find_scales_four_over_six(tiles, w, values, op, amax, scales);
  }
  tiles.for_each_cell(w, grain, [&](int tile, int64_t row, int64_t col) {
    output.scale.at(row, col) = scales.codes[tile];
  });
  if (op.rng_state) {
    encode_stochastic(values, tiles, scales.multipliers, noise, codes);
  } else {
    codes.encode<E2M1>(values, tiles, scales.multipliers);
  }
}

// Pairs of columns into bytes of a (rows, cols / 2) matrix.
void write_packed(const Codes& codes, const Window& w, uint8_t* data, int64_t stride) {
  for (int r = 0; r < w.rows; ++r) {
    const uint8_t* source = codes.row(w, r);
    uint8_t* out = data + (w.row + r) * stride + w.col / 2;
    for (int i = 0; i < w.cols / 2; ++i) out[i] = uint8_t(source[2 * i] | source[2 * i + 1] << 4);
  }
}

// Pairs of rows into bytes of a (cols, rows / 2) matrix.
void write_packed_transposed(const Codes& codes, const Window& w, uint8_t* data, int64_t stride) {
  alignas(64) uint8_t packed[kTile / 2][kPanelCols];
  for (int r = 0; r < w.rows / 2; ++r) {
    const uint8_t *even = codes.row(w, 2 * r), *odd = codes.row(w, 2 * r + 1);
    for (int c = 0; c < w.cols; ++c) packed[r][c] = uint8_t(even[c] | odd[c] << 4);
  }
  transpose_block(packed[0], kPanelCols, w.rows / 2, w.cols, data + w.col * stride + w.row / 2, stride);
}

void quantize_panel(const QuantizeNvFp4& op, const Window& w) {
  Values values;
  Codes codes;
  Noise noise;
  TileScales scales;
  values.load(op.x, w);
  if (op.rng_state) draw_noise({uint64_t(op.rng_state[0]), uint64_t(op.rng_state[1])}, w, op.x.cols, noise);
  if (op.row.data) {
    load_tensor_amax(op.row_tensor_amax, w, op.e4m3_max, scales);
    encode_direction(op, values, w, noise, op.row, {1, kTile}, codes, scales);
    write_packed(codes, w, op.row.data, op.x.cols / 2);
  }
  if (op.col.data) {
    load_tensor_amax(op.col_tensor_amax, w, op.e4m3_max, scales);
    encode_direction(op, values, w, noise, op.col, {kTile, 1}, codes, scales);
    write_packed_transposed(codes, w, op.col.data, op.x.rows / 2);
  }
}

}  // namespace

void quantize_nvfp4(const QuantizeNvFp4& op, int threads) {
  const Grid grid(op.x, op.phase);
  parallel_for(grid.count(), threads, [&](int64_t index) { quantize_panel(op, grid.window(index)); });
}

}  // namespace te_dist::cpu::TE_DIST_ISA
