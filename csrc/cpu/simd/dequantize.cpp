// Codes times scales: one fp32 product for each element, rounded once to the output type.
#include "../../numerics/scale.h"
#include "decode.h"
#include "kernels_of_level.h"
#include "parallel.h"
#include "transpose.h"

namespace te_dist::cpu::TE_DIST_ISA {
namespace {

// What is decoded at a time: long parts of rows where codes lie in the order of rows; less where they are transposed.
constexpr int kLongRows = 32, kLongCols = 2048, kTurnedRows = 128, kTurnedCols = 512;
constexpr int kLargestSpread = 128;  // elements of a tile that `spread` takes

struct Block {
  int64_t row, col;
  int rows, cols;
};

struct Scratch {
  alignas(64) uint8_t turned[kTurnedRows][kTurnedCols];
  alignas(64) uint8_t pairs[kTurnedRows / 2][kTurnedCols];
  alignas(64) uint8_t row[kLongCols];
  alignas(64) float of_tiles[kLongCols + kStep];
  alignas(64) float of_elements[kLongCols + 2 * kLargestSpread];
};

// Transposes `rows` (a block's columns) of at most kFarCols bytes into rows of kTurnedCols bytes.
void turn(const uint8_t* source, int64_t stride, int rows, int cols, uint8_t* out) {
  for (int r = 0; r < rows; r += kFarRows) {
    const int count = rows - r < kFarRows ? rows - r : kFarRows;
    transpose_far_block(source + r * stride, stride, count, cols, out + r, kTurnedCols);
  }
}

// Codes of which one fills a byte. `prepare` fetches what is not in the order of rows; `row` gives a row of a block.
struct ByteCodes {
  Plane<const uint8_t> plane;

  bool by_rows() const { return plane.col_stride == 1; }

  void prepare(const Block& b, Scratch& scratch) const {
    if (plane.row_stride == 1) {
      return turn(plane.data + b.col * plane.col_stride + b.row, plane.col_stride, b.cols, b.rows, scratch.turned[0]);
    }
    for (int r = 0; r < b.rows; ++r) {
      for (int c = 0; c < b.cols; ++c) scratch.turned[r][c] = plane.at(b.row + r, b.col + c);
    }
  }

  const uint8_t* row(const Block& b, int r, Scratch&) const {
    return plane.data + (b.row + r) * plane.row_stride + b.col;
  }
};

// Codes of which two fill a byte, along the rows or the columns of the logical matrix.
struct NibbleCodes {
  const uint8_t* data;
  int packed_dim;
  int64_t stride;  // bytes

  bool by_rows() const { return packed_dim == 1; }

  void prepare(const Block& b, Scratch& scratch) const {
    const uint8_t* source = data + b.col * stride + b.row / 2;
    turn(source, stride, b.cols, b.rows / 2, scratch.pairs[0]);
    for (int r = 0; r < b.rows / 2; ++r) {
      for (int c = 0; c < kTurnedCols; c += kVectorBytes) {
        const U16 pairs = load<U16>(&scratch.pairs[r][c]);
        store(&scratch.turned[2 * r][c], pairs & uint16_t(0x0F0F));
        store(&scratch.turned[2 * r + 1][c], (pairs >> 4) & uint16_t(0x0F0F));
      }
    }
  }

  const uint8_t* row(const Block& b, int r, Scratch& scratch) const {
    const uint8_t* source = data + (b.row + r) * stride + b.col / 2;
    const int count = b.cols / 2, whole = count / kStep * kStep;
    for (int i = 0; i < whole; i += kStep) {
      const U16 pairs = convert<U16>(load<StepBytes>(source + i));
      store(scratch.row + 2 * i, (pairs & uint16_t(0xF)) | (pairs & uint16_t(0xF0)) << 4);
    }
    for (int i = whole; i < count; ++i) {
      scratch.row[2 * i] = source[i] & 0xF;
      scratch.row[2 * i + 1] = source[i] >> 4;
    }
    return scratch.row;
  }
};

// A row of scales, as what codes are multiplied by. `fetch(tile row, first tile col, count, row, out)` writes that of
// consecutive tiles; it may write whole vectors.
template <class Fetch>
struct Scales {
  Tile tile;
  Phase phase;
  bool by_row;  // the scale changes with every row
  Fetch fetch;

  int64_t tile_row(int64_t row) const { return tile.rows ? (phase.row + row) / tile.rows : 0; }

  // One multiplier for every element of a block's row.
  const float* expand(const Block& b, int64_t row, Scratch& scratch) const {
    const int64_t first = phase.col + b.col, extent = tile.cols ? tile.cols : phase.col + b.col + b.cols;
    const int64_t first_tile = first / extent, last_tile = (first + b.cols - 1) / extent;
    const int count = int(last_tile - first_tile) + 1, before = int(first - first_tile * extent);
    fetch(tile_row(row), first_tile, count, row, scratch.of_tiles);
    switch (extent) {
      case 1: return scratch.of_tiles;
      case 16: return spread<16>(count, before, scratch);
      case 32: return spread<32>(count, before, scratch);
      case 128: return spread<128>(count, before, scratch);
      default: return spread_any(b.cols, int(extent), before, scratch);
    }
  }

 private:
  template <int kExtent>
  static const float* spread(int count, int before, Scratch& scratch) {
    for (int t = 0; t < count; ++t) {
      for (int i = 0; i < kExtent; ++i) scratch.of_elements[t * kExtent + i] = scratch.of_tiles[t];
    }
    return scratch.of_elements + before;
  }

  static const float* spread_any(int cols, int extent, int before, Scratch& scratch) {
    int left = extent - before;
    for (int c = 0, t = 0; c < cols; ++t, left = extent) {
      const int stop = left < cols - c ? c + left : cols;
      for (; c < stop; ++c) scratch.of_elements[c] = scratch.of_tiles[t];
    }
    return scratch.of_elements;
  }
};

// Bytes of a row of a plane as integers, padded to whole vectors with zeros.
void fetch_bytes(const Plane<const uint8_t>& plane, int64_t row, int64_t col, int count, uint32_t* out) {
  const uint8_t* source = &plane.at(row, col);
  for (int i = 0; i < count; ++i) out[i] = source[i * plane.col_stride];
  for (int i = count; i % kLanes; ++i) out[i] = 0;
}

template <class Code, class Element>
TE_DIST_INLINE void decode_step(const uint8_t* codes, const float* multipliers, typename Element::Storage* out) {
  const Step values = decode_codes<Code>(codes);
  Element::store_lanes(out, values.a * load<F32>(multipliers));
  Element::store_lanes(out + kLanes, values.b * load<F32>(multipliers + kLanes));
}

template <class Code, class Element>
void decode_row(const uint8_t* codes, const float* multipliers, int count, typename Element::Storage* out) {
  const int whole = count / kStep * kStep;
  for (int c = 0; c < whole; c += kStep) decode_step<Code, Element>(codes + c, multipliers + c, out + c);
  if (whole == count) return;
  uint8_t padded[kStep] = {};
  typename Element::Storage result[kStep];
  for (int i = whole; i < count; ++i) padded[i - whole] = codes[i];
  decode_step<Code, Element>(padded, multipliers + whole, result);
  for (int i = whole; i < count; ++i) out[i] = result[i - whole];
}

template <class Code, class Element, class Codes, class Fetch>
void decode_block(const Codes& codes, const Scales<Fetch>& scales, const Matrix& out, const Block& b) {
  Scratch scratch;
  const float* multipliers = nullptr;
  if (!codes.by_rows()) codes.prepare(b, scratch);
  for (int r = 0; r < b.rows; ++r) {
    const int64_t row = b.row + r;
    const bool fresh = r == 0 || scales.by_row || scales.tile_row(row) != scales.tile_row(row - 1);
    if (fresh) multipliers = scales.expand(b, row, scratch);
    const uint8_t* source = codes.by_rows() ? codes.row(b, r, scratch) : scratch.turned[r];
    auto* target = static_cast<typename Element::Storage*>(out.data) + row * out.cols + b.col;
    decode_row<Code, Element>(source, multipliers, b.cols, target);
  }
}

template <class Code, class Codes, class Fetch>
void decode(const Codes& codes, const Scales<Fetch>& scales, const Matrix& out, int threads) {
  const int height = codes.by_rows() ? kLongRows : kTurnedRows, width = codes.by_rows() ? kLongCols : kTurnedCols;
  const int64_t block_rows = (out.rows + height - 1) / height, block_cols = (out.cols + width - 1) / width;
  with_element(out.dtype, [&](auto element) {
    parallel_for(block_rows * block_cols, threads, [&](int64_t index) {
      const int64_t row = index / block_cols * height, col = index % block_cols * width;
      const int rows = int(out.rows - row < height ? out.rows - row : height);
      const int cols = int(out.cols - col < width ? out.cols - col : width);
      decode_block<Code, decltype(element)>(codes, scales, out, Block{row, col, rows, cols});
    });
  });
}

}  // namespace

void dequantize_float8(const DequantizeFloat8& op, int threads) {
  auto fetch = [&](int64_t grid_row, int64_t grid_col, int count, int64_t, float* out) {
    const float* source = &op.scale.at(grid_row, grid_col);
    for (int i = 0; i < count; ++i) out[i] = source[i * op.scale.col_stride];
  };
  const Scales<decltype(fetch)> scales{op.tile, op.phase, op.tile.rows == 1, fetch};
  with_fp8(op.fp8, [&](auto code) { decode<decltype(code)>(ByteCodes{op.data}, scales, op.out, threads); });
}

void dequantize_mxfp8(const DequantizeMxFp8& op, int threads) {
  auto fetch = [&](int64_t grid_row, int64_t grid_col, int count, int64_t, float* out) {
    alignas(64) uint32_t exponents[kLongCols + kLanes];
    fetch_bytes(op.scale, grid_row, grid_col, count, exponents);
    for (int i = 0; i < count; i += kLanes) store(out + i, e8m0_value(load<U32>(exponents + i)));
  };
  const Scales<decltype(fetch)> scales{op.grain, op.phase, op.grain.rows == 1, fetch};
  with_fp8(op.fp8, [&](auto code) { decode<decltype(code)>(ByteCodes{op.data}, scales, op.out, threads); });
}

void dequantize_nvfp4(const DequantizeNvFp4& op, int threads) {
  auto fetch = [&](int64_t grid_row, int64_t grid_col, int count, int64_t row, float* out) {
    alignas(64) uint32_t codes[kLongCols + kLanes];
    fetch_bytes(op.scale, grid_row, grid_col, count, codes);
    const float amax = op.amax.at(row, 0);
    for (int i = 0; i < count; i += kLanes) {
      store(out + i, nvfp4_decode_scale(load<U32>(codes + i), amax, op.e4m3_max));
    }
  };
  const bool by_row = op.grain.rows == 1 || op.amax.row_stride != 0;
  const Scales<decltype(fetch)> scales{op.grain, op.phase, by_row, fetch};
  const NibbleCodes codes{op.data, op.packed_dim, (op.packed_dim == 1 ? op.out.cols : op.out.rows) / 2};
  decode<E2M1>(codes, scales, op.out, threads);
}

}  // namespace te_dist::cpu::TE_DIST_ISA
