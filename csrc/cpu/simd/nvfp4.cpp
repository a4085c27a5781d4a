// NVFP4: 4-bit codes with an e4m3 scale byte for 16, or 16 x 16, values below one amax for the tensor (or for each
// row).
#include "../../numerics/philox.h"
#include "../../numerics/scale.h"
#include "apply.h"
#include "kernels_of_level.h"
#include "panel.h"
#include "parallel.h"
#include "transpose.h"

namespace te_dist::cpu::TE_DIST_ISA {
namespace {

constexpr int kTile = 16, kPanelCols = 512;
using Grid = PanelGrid<kTile, kPanelCols>;
using Codes = CodePanel<kTile, kPanelCols>;
using Tiles = TileGrid<kTile, kPanelCols>;
using Noise = CodePanel<kTile, kPanelCols>;

// Scale bytes of the tiles of a panel, and what elements are multiplied by.
struct TileScales {
  alignas(64) float tensor_amax[kTile];   // of each row of the panel
  alignas(64) float tensor_scale[kTile];  // from it
  alignas(64) uint32_t codes[Tiles::kMaxCount];
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
    const int first = r * tiles.cols;
    apply(amax + first, tiles.cols, [&](int i, F32 block_amax) {
      const U32 code = nvfp4_block_code(block_amax, tensor_scale);
      store(scales.codes + first + i, code);
      store(scales.multipliers + first + i, nvfp4_block_multiplier(code, tensor_scale));
    });
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

// A panel in fp32, for the ways to round that look at every element more than once.
struct FloatPanel {
  alignas(64) float values[kTile][kPanelCols];

  template <class Values>
  void convert(const Values& source) {
    for (int r = 0; r < kTile; ++r) {
      for (int c = 0; c < kPanelCols; c += kLanes) {
        store(&values[r][c], Values::Element::load_lanes(&source.elements[r][c]));
      }
    }
  }
};

// Error of a tile under one scale byte, in fp32: every row from left to right, then rows of a square folded in halves.
// A run along rows is summed from top to bottom. This order is part of the definition.
float candidate_error(const FloatPanel& values, const Tiles& tiles, const TileWindow& t, const Candidate& candidate) {
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
void find_scales_four_over_six(const Tiles& tiles, const Window& w, const FloatPanel& values, const QuantizeNvFp4& op,
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
    scales.codes[i] = chosen.code;
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

template <class Values>
void encode_stochastic(const Values& values, int row, const float* multipliers, const uint8_t* noise, uint8_t* out) {
  for (int c = 0; c < kPanelCols; c += kStep) {
    U32 codes[2];
    for (int half = 0; half < 2; ++half) {
      const int first = c + half * kLanes;
      const F32 scaled = Values::Element::load_lanes(&values.elements[row][first]) * load<F32>(multipliers + first);
      codes[half] = encode_e2m1_stochastic(scaled, convert<F32>(widen(load<LaneBytes>(noise + first))));
    }
    store(out + c, narrow(codes[0], codes[1]));
  }
}

// Everything about a panel that both directions share.
template <class Values>
struct Source {
  const QuantizeNvFp4& op;
  const Window& w;
  const Values& values;
  const Noise& noise;
};

template <class Values>
void encode(const Source<Values>& source, const Tiles& tiles, const float* multipliers, Codes& codes) {
  alignas(64) float of_elements[kPanelCols];
  for (int r = 0; r < kTile; ++r) {
    if (r % tiles.tile_rows == 0) tiles.expand(multipliers + r / tiles.tile_rows * tiles.cols, of_elements);
    if (source.op.rng_state) {
      encode_stochastic(source.values, r, of_elements, source.noise.codes[r], codes.codes[r]);
    } else {
      encode_e2m1_row<typename Values::Element>(source.values.elements[r], kPanelCols, of_elements, codes.codes[r]);
    }
  }
}

template <class Values>
void encode_direction(const Source<Values>& source, const BlockOutput<uint8_t>& output,
                      const Plane<const float>& tensor_amax, Tile grain, Codes& codes) {
  const Tiles tiles(output.tile);
  TileScales scales;
  alignas(64) float amax[Tiles::kMaxCount] = {};
  load_tensor_amax(tensor_amax, source.w, source.op.e4m3_max, scales);
  if (output.amax.data) {
    tiles.load_amax(output.amax, source.w, amax);
  } else {
    tiles.find_amax(source.values, amax);
  }
  if (source.op.four_over_six == FourOverSix::kNone) {
    find_scales(tiles, source.w, amax, scales);
  } else {
    FloatPanel values;
    values.convert(source.values);
    find_scales_four_over_six(tiles, source.w, values, source.op, amax, scales);
  }
  tiles.for_each_cell(source.w, grain, [&](int tile, int64_t row, int64_t col) {
    output.scale.at(row, col) = uint8_t(scales.codes[tile]);
  });
  encode(source, tiles, scales.multipliers, codes);
}

// Pairs of columns into bytes of a (rows, cols / 2) matrix.
void write_packed(const Codes& codes, const Window& w, uint8_t* data, int64_t stride) {
  const int count = w.cols / 2, whole = count / kStep * kStep;
  for (int r = 0; r < w.rows; ++r) {
    const uint8_t* source = codes.row(w, r);
    uint8_t* out = data + (w.row + r) * stride + w.col / 2;
    for (int i = 0; i < whole; i += kStep) {
      const U16 pairs = load<U16>(source + 2 * i);
      store(out + i, narrow((pairs | pairs >> 4) & uint16_t(0xFF)));
    }
    for (int i = whole; i < count; ++i) out[i] = uint8_t(source[2 * i] | source[2 * i + 1] << 4);
  }
}

// Codes of up to kStripPanels panels, one below the other, in pairs of rows: high enough to be transposed in whole
// vectors.
constexpr int kStripPanels = 8;

struct PackedStrip {
  alignas(64) uint8_t pairs[kStripPanels * kTile / 2][kPanelCols];
  int rows = 0;

  void append(const Codes& codes, const Window& w) {
    for (int r = 0; r < w.rows; r += 2, ++rows) {
      const uint8_t *even = codes.codes[w.row_offset + r], *odd = codes.codes[w.row_offset + r + 1];
      for (int c = 0; c < kPanelCols; c += kVectorBytes) {
        store(&pairs[rows][c], load<U16>(even + c) | load<U16>(odd + c) << 4);
      }
    }
  }

  // Into a (cols, rows / 2) matrix. `first`: the uppermost window.
  void write(const Window& first, uint8_t* data, int64_t stride) const {
    uint8_t* out = data + first.col * stride + first.row / 2;
    transpose_block<uint8_t, true>(&pairs[0][first.col_offset], kPanelCols, rows, first.cols, out, stride);
  }
};

template <class Element>
void quantize_panel(const QuantizeNvFp4& op, const Window& w, PackedStrip& strip) {
  using Values = Panel<Element, kTile, kPanelCols>;
  Values values;
  Codes codes;
  Noise noise;
  values.load(op.x, w);
  if (op.rng_state) draw_noise({uint64_t(op.rng_state[0]), uint64_t(op.rng_state[1])}, w, op.x.cols, noise);
  const Source<Values> source{op, w, values, noise};
  if (op.row.data) {
    encode_direction(source, op.row, op.row_tensor_amax, {1, kTile}, codes);
    write_packed(codes, w, op.row.data, op.x.cols / 2);
  }
  if (op.col.data) {
    encode_direction(source, op.col, op.col_tensor_amax, {kTile, 1}, codes);
    strip.append(codes, w);
  }
}

}  // namespace

void quantize_nvfp4(const QuantizeNvFp4& op, int threads) {
  const Grid grid(op.x, op.phase);
  const int64_t strips = grid.count() ? (grid.panel_rows + kStripPanels - 1) / kStripPanels : 0;
  with_element(op.x.dtype, [&](auto element) {
    parallel_for(strips * grid.panel_cols, threads, [&](int64_t index) {
      PackedStrip strip;
      const int64_t top = index / grid.panel_cols * kStripPanels, panel_col = index % grid.panel_cols;
      for (int64_t row = top; row < top + kStripPanels && row < grid.panel_rows; ++row) {
        quantize_panel<decltype(element)>(op, grid.window(row * grid.panel_cols + panel_col), strip);
      }
      const Window first = grid.window(top * grid.panel_cols + panel_col);
      if (op.col.data) strip.write(first, op.col.data, op.x.rows / 2);
    });
  });
}

}  // namespace te_dist::cpu::TE_DIST_ISA
