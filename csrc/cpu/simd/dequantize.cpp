// Codes times scales: one fp32 product for each element, rounded once to the output type.
#include "../../numerics/scale.h"
#include "kernels_of_level.h"
#include "elements.h"
#include "parallel.h"
#include "transpose.h"

namespace te_dist::cpu::TE_DIST_ISA {
namespace {

constexpr int kRows = 64, kCols = 256;  // of a block that is decoded at a time

struct Block {
  int64_t row, col;
  int rows, cols;
};

// How the codes of a matrix lie in memory, one in a byte.
struct ByteCodes {
  Plane<const uint8_t> plane;

  // Codes of row `row` of a block: in place where they are contiguous, else gathered into `buffer` beforehand.
  bool in_place() const { return plane.col_stride == 1; }
  const uint8_t* row(int64_t row, int64_t col) const { return plane.data + row * plane.row_stride + col; }

  void gather(const Block& b, uint8_t (&buffer)[kRows][kCols]) const {
    if (plane.row_stride == 1) {
      const uint8_t* source = plane.data + b.col * plane.col_stride + b.row;
      transpose_block(source, plane.col_stride, b.cols, b.rows, buffer[0], kCols);
      return;
    }
    for (int r = 0; r < b.rows; ++r) {
      for (int c = 0; c < b.cols; ++c) buffer[r][c] = plane.at(b.row + r, b.col + c);
    }
  }
};

// Two codes in a byte, along the rows or the columns of the logical matrix.
struct NibbleCodes {
  const uint8_t* data;
  int packed_dim;
  int64_t stride;  // bytes

  bool in_place() const { return false; }
  const uint8_t* row(int64_t, int64_t) const { return nullptr; }

  void gather(const Block& b, uint8_t (&buffer)[kRows][kCols]) const {
    if (packed_dim == 1) {
      for (int r = 0; r < b.rows; ++r) {
        const uint8_t* source = data + (b.row + r) * stride + b.col / 2;
        for (int c = 0; c < b.cols / 2; ++c) {
          buffer[r][2 * c] = source[c] & 0xF;
          buffer[r][2 * c + 1] = source[c] >> 4;
        }
      }
      return;
    }
    alignas(64) uint8_t pairs[kRows / 2][kCols];
    transpose_block(data + b.col * stride + b.row / 2, stride, b.cols, b.rows / 2, pairs[0], kCols);
    for (int r = 0; r < b.rows / 2; ++r) {
      for (int c = 0; c < b.cols; ++c) {
        buffer[2 * r][c] = pairs[r][c] & 0xF;
        buffer[2 * r + 1][c] = pairs[r][c] >> 4;
      }
    }
  }
};

// Tiles that share a scale. `scale(tile row, tile col, row)` is what their codes are multiplied by.
template <class Scale>
struct Scales {
  Tile tile;
  Phase phase;
  bool by_row;  // the scale changes with every row
  Scale scale;

  int64_t tile_row(int64_t row) const { return tile.rows ? (phase.row + row) / tile.rows : 0; }

  void expand(const Block& b, int64_t row, float* multipliers) const {
    const int64_t grid_row = tile_row(row);
    for (int c = 0; c < b.cols;) {
      const int64_t position = phase.col + b.col + c;
      const int64_t grid_col = tile.cols ? position / tile.cols : 0;
      const int64_t left = tile.cols ? (grid_col + 1) * tile.cols - position : b.cols;
      const int stop = left < b.cols - c ? c + int(left) : b.cols;
      const float multiplier = scale(grid_row, grid_col, row);
      for (; c < stop; ++c) multipliers[c] = multiplier;
    }
  }
};

template <class Code, class Element>
void decode_row(const uint8_t* __restrict codes, const float* __restrict multipliers, int count,
                typename Element::Storage* __restrict out) {
  for (int c = 0; c < count; ++c) out[c] = Element::store(Code::decode(codes[c]) * multipliers[c]);
}

template <class Code, class Element, class Codes, class Scale>
void decode_block(const Codes& codes, const Scales<Scale>& scales, const Matrix& out, const Block& b) {
  alignas(64) uint8_t buffer[kRows][kCols];
  alignas(64) float multipliers[kCols];
  if (!codes.in_place()) codes.gather(b, buffer);
  for (int r = 0; r < b.rows; ++r) {
    const int64_t row = b.row + r;
    const bool fresh = r == 0 || scales.by_row || scales.tile_row(row) != scales.tile_row(row - 1);
    if (fresh) scales.expand(b, row, multipliers);
    const uint8_t* source = codes.in_place() ? codes.row(row, b.col) : buffer[r];
    auto* target = static_cast<typename Element::Storage*>(out.data) + row * out.cols + b.col;
    decode_row<Code, Element>(source, multipliers, b.cols, target);
  }
}

template <class Code, class Codes, class Scale>
void decode(const Codes& codes, const Scales<Scale>& scales, const Matrix& out, int threads) {
  const int64_t block_cols = (out.cols + kCols - 1) / kCols, block_rows = (out.rows + kRows - 1) / kRows;
  with_element(out.dtype, [&](auto element) {
    parallel_for(block_rows * block_cols, threads, [&](int64_t index) {
      const int64_t row = index / block_cols * kRows, col = index % block_cols * kCols;
      const int rows = int(out.rows - row < kRows ? out.rows - row : kRows);
      const int cols = int(out.cols - col < kCols ? out.cols - col : kCols);
      decode_block<Code, decltype(element)>(codes, scales, out, Block{row, col, rows, cols});
    });
  });
}

}  // namespace

void dequantize_float8(const DequantizeFloat8& op, int threads) {
  auto scale = [&](int64_t row, int64_t col, int64_t) { return op.scale.at(row, col); };
  const Scales<decltype(scale)> scales{op.tile, op.phase, op.tile.rows == 1, scale};
  with_fp8(op.fp8, [&](auto code) { decode<decltype(code)>(ByteCodes{op.data}, scales, op.out, threads); });
}

void dequantize_mxfp8(const DequantizeMxFp8& op, int threads) {
  auto scale = [&](int64_t row, int64_t col, int64_t) { return e8m0_value(op.scale.at(row, col)); };
  const Scales<decltype(scale)> scales{op.grain, op.phase, op.grain.rows == 1, scale};
  with_fp8(op.fp8, [&](auto code) { decode<decltype(code)>(ByteCodes{op.data}, scales, op.out, threads); });
}

void dequantize_nvfp4(const DequantizeNvFp4& op, int threads) {
  auto scale = [&](int64_t grid_row, int64_t grid_col, int64_t row) {
    return nvfp4_decode_scale(op.scale.at(grid_row, grid_col), op.amax.at(row, 0), op.e4m3_max);
  };
  const bool by_row = op.grain.rows == 1 || op.amax.row_stride != 0;
  const Scales<decltype(scale)> scales{op.grain, op.phase, by_row, scale};
  const NibbleCodes codes{op.data, op.packed_dim, (op.packed_dim == 1 ? op.out.cols : op.out.rows) / 2};
  decode<E2M1>(codes, scales, op.out, threads);
}

}  // namespace te_dist::cpu::TE_DIST_ISA
