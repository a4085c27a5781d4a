// MXFP8: FP8 with a power-of-two scale byte for 32, or 32 x 32, values. Both directions in one pass over the input.
#pragma once

#include "common/codes.cuh"
#include "common/panels.cuh"
#include "common/source.cuh"

namespace te_dist::cuda {

// kLoad, kStore, kScaleStore: bytes that can be read and written at a time, of values, codes, and scale bytes of a row.
template <class Source, class Code, Share kRow, Share kCol, int kLoad, int kStore, int kScaleStore, class Panels,
          class Lanes>
struct QuantizeMxFp8 {
  using Element = typename Source::Element;
  static constexpr int kThreads = kPanelThreads;
  static constexpr int kBlocks = Element::kPerWord == 2 && kLoad >= 8 && !Source::kIsPaired ? 3 : 2;
  static constexpr int kTile = 32;

  struct Params {
    typename Source::Params source;
    Extents extents;
    Panels panels;
    const uint32_t* noop;
    BlockOutput<uint8_t> row;  // data (rows, cols)
    BlockOutput<uint8_t> col;  // data (rows, cols), of groups (rows of all tiles, cols)
  };

  static constexpr bool kHasRow = kRow != Share::kAbsent, kHasCol = kCol != Share::kAbsent;
  static constexpr bool kHasSquare = kRow == Share::kSquare || kCol == Share::kSquare;
  static constexpr int kAcross = Lanes::kCols / kTile, kDown = Lanes::kRows / kTile;  // tiles of a panel
  static constexpr int kTileWarps = kTile / Lanes::kWarpRows;                         // that hold a tile
  static_assert(!(Source::kHasSums || Source::kHasRowSums) || Lanes::kRows == kPanel, "sums are those of square panels");

  // Amaxes of columns and of 32 columns in each warp's rows, and the columns' multipliers.
  struct Shared {
    float columns[kCol == Share::kRun ? kWarps : 1][Lanes::kCols];
    float squares[kWarps][kAcross];
    float multipliers[kCol == Share::kRun ? kDown : 1][Lanes::kCols];
  };

  // Four lanes hold a run of a row; each settles two of the eight rows of a patch.
  using Rows = SharedOut<Lanes::kPatchRows, 2 * Lanes::kPatchRows>;
  static constexpr int kNextRun = 4 * Lanes::kPatchRows;  // lanes from a run of a row to the next
  using RowExponents = uint32_t[Rows::kOwned];

  const Params& p;
  const View view;
  const Place place;
  Shared& shared;
  Patch<Element> patch;

  TE_DIST_INLINE uint32_t exponent(float amax) {
    const uint32_t bits = Code::kShift == E4M3::kShift ? kReciprocalOfE4M3Max : kReciprocalOfE5M2Max;
    return e8m0_round_up(amax * float_of(bits));
  }

  TE_DIST_DEVICE int64_t tile_row() const { return place.panel_row * kDown + place.local_row / kTile; }
  TE_DIST_DEVICE int64_t tile_col() const { return place.panel_col * kAcross + place.local_col / kTile; }

  // Number of tiles that the matrix touches.
  TE_DIST_DEVICE int64_t grid_rows() const { return (p.panels.tiled_rows(view) + kTile - 1) / kTile; }
  TE_DIST_DEVICE int64_t grid_cols() const { return (view.phase.col + view.extents.cols + kTile - 1) / kTile; }

  // Stores the exponents of rows. Each lane knows those of one run of two rows: pairs of lanes take a row each, then bytes
  // of more and more runs come together.
  TE_DIST_DEVICE void store_row_exponents(const RowExponents& found) const {
    const bool second = threadIdx.x & kNextRun;
    const uint32_t other = __shfl_xor_sync(kFullWarp, second ? found[0] : found[1], kNextRun);
    uint32_t bytes[kAcross / 4] = {second ? found[1] << 8 | other : found[0] | other << 8};
    bytes[0] |= __shfl_xor_sync(kFullWarp, bytes[0], 2 * kNextRun) << 16;
    if constexpr (kAcross == 8) bytes[1] = __shfl_xor_sync(kFullWarp, bytes[0], 4 * kNextRun);
    if (threadIdx.x % 32 >= 2 * kNextRun) return;  // the leftmost have them in order
    const int i = Rows::first() + second;
    const int64_t first = place.panel_col * kAcross;
    const Inside inside = Inside::of(first, kAcross, grid_cols()).only_if(place.rows.has(i));
    if constexpr (kScaleStore > 1) {
      store_run<kAcross, kScaleStore>(reinterpret_cast<char*>(&p.row.scale.at(place.row + i, first)), inside, bytes);
    } else {
#pragma unroll
      for (int t = 0; t < kAcross; ++t) {
        if (inside.has(t)) p.row.scale.at(place.row + i, first + t) = uint8_t(bytes[t / 4] >> (8 * (t % 4)));
      }
    }
  }

  TE_DIST_DEVICE void settle_runs_of_rows(float (&multipliers)[kPatch]) const {
    float values[kPatch], owned[Rows::kOwned];
    RowExponents found;
    patch.row_amax(values);
    Rows::largest(values, owned);
#pragma unroll
    for (int k = 0; k < Rows::kOwned; ++k) {
      const int i = Rows::first() + k;
      const bool is_given = p.row.amax.data && place.rows.has(i) && tile_col() < grid_cols();
      found[k] = exponent(is_given ? p.row.amax.at(place.row + i, tile_col()) : owned[k]);
      owned[k] = e8m0_inverse(found[k]);
    }
    store_row_exponents(found);
#pragma unroll
    for (int i = 0; i < kPatch; ++i) multipliers[i] = Rows::of(owned, i);
  }

  // Puts what other warps need to know of the amaxes of columns and of squares into shared memory.
  TE_DIST_DEVICE void share_amaxes() {
    if constexpr (kCol == Share::kRun) patch.template share_col_amax<Lanes>(place, shared.columns);
    if constexpr (kHasSquare) {
      float amax = patch.amax();
#pragma unroll
      for (int mask = 1; mask < kNextRun; mask *= 2) amax = larger_of_lanes(amax, mask);
      if (threadIdx.x % kNextRun == 0) shared.squares[threadIdx.x / 32][place.local_col / kTile] = amax;
    }
  }

  // Exponents of the columns' runs, two to a thread; neighbours write neighbouring bytes.
  TE_DIST_DEVICE void settle_runs_of_columns() {
#pragma unroll
    for (int k = 0; k < kDown * Lanes::kCols / kThreads; ++k) {
      const int tile = k * (kThreads / Lanes::kCols) + threadIdx.x / Lanes::kCols, local_col = threadIdx.x % Lanes::kCols;
      const int64_t row = place.panel_row * kDown + tile, col = place.first_col() + local_col;
      const bool is_inside = row < grid_rows() && col >= 0 && col < view.extents.cols;
      float amax = 0.0f;
#pragma unroll
      for (int w = 0; w < kTileWarps; ++w) amax = fmaxf(amax, shared.columns[tile * kTileWarps + w][local_col]);
      if (is_inside && p.col.amax.data) amax = p.col.amax.at(row, col);
      const uint32_t found = exponent(amax);
      if (is_inside) p.col.scale.at(row, col) = uint8_t(found);
      shared.multipliers[tile][local_col] = e8m0_inverse(found);
    }
  }

  TE_DIST_DEVICE uint32_t square_exponent(const BlockOutput<uint8_t>& output) const {
    const int warp = threadIdx.x / 32 / kTileWarps * kTileWarps;
    float amax = 0.0f;
#pragma unroll
    for (int w = 0; w < kTileWarps; ++w) amax = fmaxf(amax, shared.squares[warp + w][place.local_col / kTile]);
    const bool is_inside = tile_row() < grid_rows() && tile_col() < grid_cols();
    if (output.amax.data && is_inside) amax = output.amax.at(tile_row(), tile_col());
    return exponent(amax);
  }

  // A square's exponent is stored once for every row; or for every column.
  TE_DIST_DEVICE float settle_square_by_rows() const {
    const uint32_t found = square_exponent(p.row);
    store_row_exponents({found, found});
    return e8m0_inverse(found);
  }

  TE_DIST_DEVICE float settle_square_by_columns() const {
    const uint32_t found = square_exponent(p.col);
    // Of the four threads with the same columns one writes.
    const bool writes = place.local_row % kTile == 0 && tile_row() < grid_rows();
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      if (writes && place.cols.has(j)) p.col.scale.at(tile_row(), place.col + j) = uint8_t(found);
    }
    return e8m0_inverse(found);
  }

  TE_DIST_DEVICE void write(const float (&by_row)[kPatch], const float (&by_col)[kPatch]) const {
    const int64_t first = place.row * place.extents.cols + place.col;
    const int64_t first_of_col = Panels::col_row(view, place.row) * place.extents.cols + place.col;
    char* row_code = reinterpret_cast<char*>(p.row.data) + first;
    char* col_code = reinterpret_cast<char*>(p.col.data) + first_of_col;
#pragma unroll
    for (int i = 0; i < kPatch; ++i, row_code += place.extents.cols, col_code += place.extents.cols) {
      const Inside inside = place.cols.only_if(place.rows.has(i));
      float values[kPatch], multipliers[kPatch];
      uint32_t codes[2];
      patch.row(i, values);
      if constexpr (kHasRow) {
        fill(multipliers, by_row[i]);
        encode_eight<Code>(values, multipliers, codes);
        store_run<kPatch, kStore>(row_code, inside, codes);
      }
      if constexpr (kHasCol) {
        encode_eight<Code>(values, by_col, codes);
        store_run<kPatch, kStore>(col_code, Panels::kIsGrouped ? place.cols : inside, codes);
      }
    }
  }

  TE_DIST_DEVICE void encode() {
    float by_row[kPatch], by_col[kPatch];
    if constexpr (kCol == Share::kRun || kHasSquare) {
      share_amaxes();
      __syncthreads();
    }
    if constexpr (kCol == Share::kRun) settle_runs_of_columns();
    if constexpr (kRow == Share::kRun) settle_runs_of_rows(by_row);
    if constexpr (kRow == Share::kSquare) fill(by_row, settle_square_by_rows());
    if constexpr (kCol == Share::kSquare) fill(by_col, settle_square_by_columns());
    if constexpr (kCol == Share::kRun) {
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kPatch; ++j) by_col[j] = shared.multipliers[place.local_row / kTile][place.local_col + j];
    }
    write(by_row, by_col);
  }

  TE_DIST_INLINE void run(const Params& p, int64_t panel) {
    if (is_set(p.noop)) return;
    __shared__ Shared shared;
    const View view = view_of<Source::kIsPaired, Lanes>(p.panels, p.extents, panel);
    QuantizeMxFp8 self{p, view, place_of<Source::kIsPaired, Lanes>(view, panel), shared, {}};
    // There are blocks for as many tiles of rows as groups may have; such a tile is written by columns to its end.
    constexpr int kPanels = kPanel / Lanes::kRows;
    const int64_t first_of_tile = self.place.panel_row / kPanels * kPanel - view.phase.row;
    if (Panels::kIsGrouped && first_of_tile >= view.extents.rows) return;
    if constexpr (Source::kIsPaired) {
      with_pair<Source, kLoad, Panels::kIsGrouped, Lanes>(
          p.source, self.place, [&](const Place& at, const Patch<Element>& patch) {
            QuantizeMxFp8{p, view, at, shared, patch}.encode();
          });
    } else {
      load_patch<Source, kLoad, Panels::kIsGrouped>(p.source, self.place, self.patch);
      self.encode();
    }
  }

  TE_DIST_INLINE void run(const Params& p) { run(p, blockIdx.x); }
};

}  // namespace te_dist::cuda
