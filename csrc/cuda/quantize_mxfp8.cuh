// MXFP8: FP8 with a power-of-two scale byte for 32, or 32 x 32, values. Both directions in one pass over the input.
#pragma once

#include "common/codes.cuh"
#include "common/patch.cuh"

namespace te_dist::cuda {

// kLoad, kStore: bytes that can be read and written at a time.
template <class Element, class Code, Share kRow, Share kCol, int kLoad, int kStore>
struct QuantizeMxFp8 {
  static constexpr int kThreads = kPanelThreads;
  static constexpr int kBlocks = Element::kPerWord == 2 && kLoad >= 8 ? 3 : 2;
  static constexpr int kTile = 32;

  struct Params {
    const void* x;
    Extents extents;
    Phase phase;
    BlockOutput<uint8_t> row;  // data (rows, cols)
    BlockOutput<uint8_t> col;  // data (rows, cols)
  };

  using Rows = SharedOut<1, 2>;

  const Params& p;
  const Place place;
  Patch<Element> patch;

  int64_t tile_row, tile_col;    // of the patch in the grid of the matrix
  bool touches_row, touches_col;  // whether that tile has a row, or a column, in the matrix

  TE_DIST_INLINE uint32_t exponent(float amax) {
    const uint32_t bits = Code::kShift == E4M3::kShift ? kReciprocalOfE4M3Max : kReciprocalOfE5M2Max;
    return e8m0_round_up(amax * float_of(bits));
  }

  // Exponents of the rows' runs: four lanes hold one, each of them settles two rows.
  TE_DIST_DEVICE void settle_runs_of_rows(float (&multipliers)[kPatch]) const {
    float values[kPatch], owned[Rows::kOwned];
    patch.row_amax(values);
    Rows::largest(values, owned);
#pragma unroll
    for (int i = 0; i < Rows::kOwned; ++i) {
      const int64_t row = place.row + Rows::first() + i;
      const bool is_inside = place.rows.has(Rows::first() + i) && touches_col;
      if (is_inside && p.row.amax.data) owned[i] = p.row.amax.at(row, tile_col);
      const uint32_t found = exponent(owned[i]);
      if (is_inside) p.row.scale.at(row, tile_col) = uint8_t(found);
      owned[i] = e8m0_inverse(found);
    }
#pragma unroll
    for (int i = 0; i < kPatch; ++i) multipliers[i] = Rows::of(owned, i);
  }

  // Exponents of the columns' runs: every lane settles its eight columns, one of four lanes writes them.
  TE_DIST_DEVICE void settle_runs_of_columns(float (&multipliers)[kPatch]) const {
    uint32_t columns[Patch<Element>::kWords];
    patch.col_amax(columns);
#pragma unroll
    for (int w = 0; w < Patch<Element>::kWords; ++w) {
      columns[w] = Element::raise(columns[w], __shfl_xor_sync(kFullWarp, columns[w], 8));
      columns[w] = Element::raise(columns[w], __shfl_xor_sync(kFullWarp, columns[w], 16));
    }
    const bool writes = (threadIdx.x & 24) == 0;
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      float amax = Element::value(columns[j / Element::kPerWord], j % Element::kPerWord);
      const bool is_inside = touches_row && place.cols.has(j);
      if (is_inside && p.col.amax.data) amax = p.col.amax.at(tile_row, place.col + j);
      const uint32_t found = exponent(amax);
      if (is_inside && writes) p.col.scale.at(tile_row, place.col + j) = uint8_t(found);
      multipliers[j] = e8m0_inverse(found);
    }
  }

  TE_DIST_DEVICE uint32_t square_exponent(const BlockOutput<uint8_t>& output) const {
    float amax = patch.amax();
#pragma unroll
    for (int mask : {1, 2, 8, 16}) amax = larger_of_lanes(amax, mask);
    if (output.amax.data && touches_row && touches_col) amax = output.amax.at(tile_row, tile_col);
    return exponent(amax);
  }

  // A square's exponent is stored once for every row; or for every column.
  TE_DIST_DEVICE void settle_square_by_rows(float (&multipliers)[kPatch]) const {
    const uint32_t found = square_exponent(p.row);
    fill(multipliers, e8m0_inverse(found));
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      const bool writes = (threadIdx.x & 3) == 0 && touches_col && place.rows.has(i);
      if (writes) p.row.scale.at(place.row + i, tile_col) = uint8_t(found);
    }
  }

  TE_DIST_DEVICE void settle_square_by_columns(float (&multipliers)[kPatch]) const {
    const uint32_t found = square_exponent(p.col);
    fill(multipliers, e8m0_inverse(found));
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      const bool writes = (threadIdx.x & 24) == 0 && touches_row && place.cols.has(j);
      if (writes) p.col.scale.at(tile_row, place.col + j) = uint8_t(found);
    }
  }

  TE_DIST_INLINE void encode(const float (&values)[kPatch], const float (&multipliers)[kPatch], uint32_t (&codes)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int j = 4 * h;
      codes[h] = encode_four<Code>(values[j] * multipliers[j], values[j + 1] * multipliers[j + 1],
                                   values[j + 2] * multipliers[j + 2], values[j + 3] * multipliers[j + 3]);
    }
  }

  TE_DIST_DEVICE void write(const float (&by_row)[kPatch], const float (&by_col)[kPatch]) const {
    const int64_t first = place.row * place.extents.cols + place.col;
    char* row_code = reinterpret_cast<char*>(p.row.data) + first;
    char* col_code = reinterpret_cast<char*>(p.col.data) + first;
#pragma unroll
    for (int i = 0; i < kPatch; ++i, row_code += place.extents.cols, col_code += place.extents.cols) {
      const Inside inside = place.cols.only_if(place.rows.has(i));
      float values[kPatch], multipliers[kPatch];
      uint32_t codes[2];
#pragma unroll
      for (int j = 0; j < kPatch; ++j) values[j] = patch.value(i, j);
      if constexpr (kRow != Share::kAbsent) {
        fill(multipliers, by_row[i]);
        encode(values, multipliers, codes);
        store_run<kPatch, kStore>(row_code, inside, codes);
      }
      if constexpr (kCol != Share::kAbsent) {
        encode(values, by_col, codes);
        store_run<kPatch, kStore>(col_code, inside, codes);
      }
    }
  }

  TE_DIST_DEVICE void quantize() {
    tile_row = place.panel_row * (kPanel / kTile) + place.local_row / kTile;
    tile_col = place.panel_col * (kPanel / kTile) + place.local_col / kTile;
    touches_row = place.tile_has_rows(kTile);
    touches_col = place.tile_has_cols(kTile);
    patch.template load<kLoad>(p.x, place);
    float by_row[kPatch], by_col[kPatch];
    if constexpr (kRow == Share::kRun) settle_runs_of_rows(by_row);
    if constexpr (kRow == Share::kSquare) settle_square_by_rows(by_row);
    if constexpr (kCol == Share::kRun) settle_runs_of_columns(by_col);
    if constexpr (kCol == Share::kSquare) settle_square_by_columns(by_col);
    write(by_row, by_col);
  }

  TE_DIST_INLINE void run(const Params& p) {
    QuantizeMxFp8{p, Place::of<TallWarps>(p.extents, p.phase, blockIdx.x), {}}.quantize();
  }
};

}  // namespace te_dist::cuda
