// NVFP4: 4-bit codes with an e4m3 scale byte for 16, or 16 x 16, values below one amax for the tensor (or for each row).
// Both directions in one pass over the input.
#pragma once

#include "common/codes.cuh"
#include "common/noise.cuh"
#include "common/source.cuh"

namespace te_dist::cuda {

enum class FourOverSix { kNone, kMeanAbsolute, kMeanSquare };
enum class Rounding { kNearest, kStochastic, kStochasticAligned };

// How values become codes; kAmaxPerRow: every row has its own tensor amax, in the row direction.
template <Rounding kRounding_, FourOverSix kFourOverSix_, bool kAmaxPerRow_>
struct NvFp4Rule {
  static constexpr bool kAmaxPerRow = kAmaxPerRow_;
  static constexpr Rounding kRounding = kRounding_;
  static constexpr FourOverSix kFourOverSix = kFourOverSix_;
};

// kLoad, kRowStore, kColStore: bytes that can be read and written at a time. kRowScaleStore, kColScaleStore: the same of the
// scale bytes of one row, or column; 0 where they do not lie beside each other.
template <class Source, class Rule, Share kRow, Share kCol, int kLoad, int kRowStore, int kColStore, int kRowScaleStore,
          int kColScaleStore>
struct QuantizeNvFp4 {
  using Element = typename Source::Element;
  static constexpr int kThreads = kPanelThreads;
  static constexpr int kBlocks = Element::kPerWord == 2 && Rule::kRounding == Rounding::kNearest && kLoad >= 8 ? 3 : 2;
  static constexpr int kTile = 16;
  static constexpr bool kHasRow = kRow != Share::kAbsent, kHasCol = kCol != Share::kAbsent;
  static constexpr bool kStochastic = Rule::kRounding != Rounding::kNearest;
  static constexpr bool kChooses = Rule::kFourOverSix != FourOverSix::kNone;
  static constexpr int kLaneBesideCols = 2, kLaneBesideRows = 1;  // masks of the lane with the rest of a tile

  struct Params {
    typename Source::Params source;
    Extents extents;
    Phase phase;
    const uint32_t* noop;
    float e4m3_max;
    const int64_t* rng_state;             // (seed, offset)
    Plane<const float> row_tensor_amax;   // row stride 0: one for the tensor
    Plane<const float> col_tensor_amax;
    BlockOutput<uint8_t> row;  // data (rows, cols / 2)
    BlockOutput<uint8_t> col;  // data (cols, rows / 2)
  };

  static constexpr int kTiles = kPanel / kTile;  // side by side in a panel

  // Codes of columns, and scale bytes of every row and column of the panel: all of one are written at a time.
  struct Shared {
    alignas(16) uint32_t transposed[kHasCol ? kPanel * kPanel / 8 : 1];
    alignas(8) uint8_t row_scales[kHasRow ? kPanel : 1][kTiles];
    alignas(8) uint8_t col_scales[kHasCol ? kPanel : 1][kTiles];
  };

  // A tile's scale byte and the multiplier of its elements.
  struct Scale {
    uint32_t code;
    float multiplier;
  };

  const Params& p;
  const Place place;
  Shared& shared;
  Patch<Element> patch;
  Noise<kStochastic> noise;
  int64_t tile_row, tile_col;    // of the patch in the grid of the matrix
  bool touches_row, touches_col;  // whether that tile has a row, or a column, in the matrix

  TE_DIST_DEVICE void keep_row_scale(int i, const Scale& scale) const {
    shared.row_scales[place.local_row + i][place.local_col / kTile] = uint8_t(scale.code);
  }

  TE_DIST_DEVICE void keep_col_scale(int j, const Scale& scale) const {
    shared.col_scales[place.local_col + j][place.local_row / kTile] = uint8_t(scale.code);
  }

  // Writes the kTiles scale bytes of one row, or column, of the panel: half of the threads take rows, half columns.
  TE_DIST_DEVICE void write_scales() const {
    const int line = threadIdx.x % kPanel;
    const Phase& phase = p.phase;
    if (kHasRow && threadIdx.x < kPanel) {
      const int64_t row = place.first_row() + line, first = place.panel_col * kTiles;
      const Inside inside = Inside::of(first, kTiles, (phase.col + p.extents.cols + kTile - 1) / kTile);
      write_line<kRowScaleStore>(shared.row_scales[line], &p.row.scale.at(row, first), p.row.scale.col_stride,
                                 inside.only_if(row >= 0 && row < p.extents.rows));
    }
    if (kHasCol && threadIdx.x >= kPanel) {
      const int64_t col = place.first_col() + line, first = place.panel_row * kTiles;
      const Inside inside = Inside::of(first, kTiles, (phase.row + p.extents.rows + kTile - 1) / kTile);
      write_line<kColScaleStore>(shared.col_scales[line], &p.col.scale.at(first, col), p.col.scale.row_stride,
                                 inside.only_if(col >= 0 && col < p.extents.cols));
    }
  }

  template <int kWidth>
  TE_DIST_INLINE void write_line(const uint8_t* bytes, uint8_t* target, int64_t stride, const Inside& inside) {
    const uint2 v = *reinterpret_cast<const uint2*>(bytes);
    const uint32_t words[2] = {v.x, v.y};
    if constexpr (kWidth > 0) {
      store_run<kTiles, kWidth>(reinterpret_cast<char*>(target), inside, words);
    } else {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        if (inside.has(t)) target[t * stride] = uint8_t(words[t / 4] >> (8 * (t % 4)));
      }
    }
  }

  TE_DIST_DEVICE Scale nearest_scale(float amax, float tensor_scale) const {
    const uint32_t code = nvfp4_block_code(amax, tensor_scale);
    return {code, nvfp4_block_multiplier(code, tensor_scale)};
  }

  TE_DIST_INLINE float error(const Scale& scale, float tensor_amax, float e4m3_max, float value) {
    const float difference = nvfp4_decode_error(encode_e2m1(value * scale.multiplier), E4M3::decode(scale.code),
                                                tensor_amax, e4m3_max, value);
    return Rule::kFourOverSix == FourOverSix::kMeanSquare ? difference * difference : fabsf(difference);
  }

  TE_DIST_DEVICE float error_of(const Scale& scale, float tensor_amax, int i, int j) const {
    if (!place.rows.has(i) || !place.cols.has(j)) return 0.0f;
    return error(scale, tensor_amax, p.e4m3_max, patch.value(i, j));
  }

  // Sum over the 16 values of a run, in order: 8 in the lane whose bit `mask` is clear, then 8 in the lane beside.
  template <class ErrorOf>
  TE_DIST_INLINE float sum_of_run(int mask, const ErrorOf& error_at) {
    float errors[kPatch], sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kPatch; ++k) errors[k] = error_at(k);
#pragma unroll
    for (int k = 0; k < kPatch; ++k) sum += errors[k];
    const float before = __shfl_xor_sync(kFullWarp, sum, mask);
    if (threadIdx.x & mask) {
      sum = before;
#pragma unroll
      for (int k = 0; k < kPatch; ++k) sum += errors[k];
    }
    return __shfl_sync(kFullWarp, sum, threadIdx.x % 32 | mask);
  }

  // Every row from left to right, then rows folded in halves.
  TE_DIST_DEVICE float sum_of_square(const Scale& scale, float tensor_amax) const {
    float rows[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      rows[i] = sum_of_run(kLaneBesideCols, [&](int j) { return error_of(scale, tensor_amax, i, j); });
      rows[i] += __shfl_xor_sync(kFullWarp, rows[i], kLaneBesideRows);
    }
#pragma unroll
    for (int half = kPatch / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) rows[i] += rows[i + half];
    }
    return rows[0];
  }

  // Of the two ways to scale a tile the one that loses less; the largest value becomes 6 where they tie.
  template <class SumOf>
  TE_DIST_INLINE Scale chosen_scale(float amax, float tensor_scale, const SumOf& sum_of) {
    Scale scales[2];
    float errors[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      scales[c].code = nvfp4_four_over_six_code(amax, tensor_scale, c ? 1.5f : 1.0f);
      scales[c].multiplier = nvfp4_block_multiplier(scales[c].code, tensor_scale);
      errors[c] = sum_of(scales[c]);
    }
    return errors[1] < errors[0] ? scales[1] : scales[0];
  }

  // Rows are settled by turns: a lane settles four of the eight that it shares with the lane beside.
  using Rows = SharedOut<kLaneBesideCols>;

  TE_DIST_DEVICE float tensor_amax_of_row(int64_t row) const {
    return *(p.row_tensor_amax.data + (Rule::kAmaxPerRow ? row * p.row_tensor_amax.row_stride : 0));
  }

  TE_DIST_DEVICE void settle_runs_of_rows(float (&multipliers)[kPatch]) const {
    float values[kPatch], owned[Rows::kOwned];
    patch.row_amax(values);
    Rows::largest(values, owned);
#pragma unroll
    for (int i = 0; i < Rows::kOwned; ++i) {
      const int64_t row = place.row + Rows::first() + i;
      const bool is_inside = place.rows.has(Rows::first() + i) && touches_col;
      if (is_inside && p.row.amax.data) owned[i] = p.row.amax.at(row, tile_col);
      if constexpr (!kChooses) {
        const float tensor_amax = is_inside || !Rule::kAmaxPerRow ? tensor_amax_of_row(row) : 0.0f;
        const Scale scale = nearest_scale(owned[i], nvfp4_tensor_scale(tensor_amax, p.e4m3_max));
        keep_row_scale(Rows::first() + i, scale);
        owned[i] = scale.multiplier;
      }
    }
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      multipliers[i] = Rows::of(owned, i);
      if constexpr (kChooses) multipliers[i] = choose_row(i, multipliers[i]);
    }
  }

  TE_DIST_DEVICE float choose_row(int i, float amax) const {
    const bool is_inside = place.rows.has(i) && touches_col;
    const float tensor_amax = is_inside || !Rule::kAmaxPerRow ? tensor_amax_of_row(place.row + i) : 0.0f;
    const Scale scale = chosen_scale(amax, nvfp4_tensor_scale(tensor_amax, p.e4m3_max), [&](const Scale& candidate) {
      return sum_of_run(kLaneBesideCols, [&](int j) { return error_of(candidate, tensor_amax, i, j); });
    });
    if (!(threadIdx.x & kLaneBesideCols)) keep_row_scale(i, scale);
    return scale.multiplier;
  }

  using Cols = SharedOut<kLaneBesideRows>;

  TE_DIST_DEVICE void settle_runs_of_columns(float (&multipliers)[kPatch]) const {
    uint32_t columns[Patch<Element>::kWords];
    float values[kPatch], owned[Cols::kOwned];
    patch.col_amax(columns);
#pragma unroll
    for (int j = 0; j < kPatch; ++j) values[j] = Element::value(columns[j / Element::kPerWord], j % Element::kPerWord);
    Cols::largest(values, owned);
    const float tensor_amax = p.col_tensor_amax.at(0, 0);
    const float tensor_scale = nvfp4_tensor_scale(tensor_amax, p.e4m3_max);
#pragma unroll
    for (int j = 0; j < Cols::kOwned; ++j) {
      const int64_t col = place.col + Cols::first() + j;
      const bool is_inside = place.cols.has(Cols::first() + j) && touches_row;
      if (is_inside && p.col.amax.data) owned[j] = p.col.amax.at(tile_row, col);
      if constexpr (!kChooses) {
        const Scale scale = nearest_scale(owned[j], tensor_scale);
        keep_col_scale(Cols::first() + j, scale);
        owned[j] = scale.multiplier;
      }
    }
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      multipliers[j] = Cols::of(owned, j);
      if constexpr (kChooses) multipliers[j] = choose_column(j, multipliers[j], tensor_amax, tensor_scale);
    }
  }

  TE_DIST_DEVICE float choose_column(int j, float amax, float tensor_amax, float tensor_scale) const {
    const Scale scale = chosen_scale(amax, tensor_scale, [&](const Scale& candidate) {
      return sum_of_run(kLaneBesideRows, [&](int i) { return error_of(candidate, tensor_amax, i, j); });
    });
    if (!(threadIdx.x & kLaneBesideRows)) keep_col_scale(j, scale);
    return scale.multiplier;
  }

  TE_DIST_DEVICE Scale square_scale(const BlockOutput<uint8_t>& output, const Plane<const float>& tensor_amaxes) const {
    float amax = patch.amax();
#pragma unroll
    for (int mask : {kLaneBesideRows, kLaneBesideCols}) amax = larger_of_lanes(amax, mask);
    const bool is_inside = touches_row && touches_col;
    if (output.amax.data && is_inside) amax = output.amax.at(tile_row, tile_col);
    const int64_t first_row = place.row - place.local_row % kTile;
    const float tensor_amax = is_inside ? tensor_amaxes.at(first_row > 0 ? first_row : 0, 0) : 0.0f;
    const float tensor_scale = nvfp4_tensor_scale(tensor_amax, p.e4m3_max);
    if constexpr (!kChooses) return nearest_scale(amax, tensor_scale);
    return chosen_scale(amax, tensor_scale,
                        [&](const Scale& candidate) { return sum_of_square(candidate, tensor_amax); });
  }

  // A square's byte is stored once for every row; or for every column.
  TE_DIST_DEVICE void settle_square_by_rows(float (&multipliers)[kPatch]) const {
    const Scale scale = square_scale(p.row, p.row_tensor_amax);
    fill(multipliers, scale.multiplier);
    if (threadIdx.x & kLaneBesideCols) return;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) keep_row_scale(i, scale);
  }

  TE_DIST_DEVICE void settle_square_by_columns(float (&multipliers)[kPatch]) const {
    const Scale scale = square_scale(p.col, p.col_tensor_amax);
    fill(multipliers, scale.multiplier);
    if (threadIdx.x & kLaneBesideRows) return;
#pragma unroll
    for (int j = 0; j < kPatch; ++j) keep_col_scale(j, scale);
  }

  TE_DIST_INLINE uint32_t encode(float value, float noise) {
    if constexpr (kStochastic) {
      return encode_e2m1_noisy(value, noise);
    } else {
      return encode_e2m1(value);
    }
  }

  // Place in shared memory of the codes of 8 rows of a column. Threads that write, or read, at a time find different banks.
  TE_DIST_INLINE int position(int col, int row) {
    const int warp = row / 16, half = row / 8 % 2;
    return warp * 256 + col % 8 * 32 + ((half * 16 + col / 8) ^ (warp / 2 * 8));
  }

  // Writes codes of rows, and those of columns into shared memory. kSame: both have the same codes.
  template <bool kSame>
  TE_DIST_DEVICE void write(const float (&by_row)[kPatch], const float (&by_col)[kPatch]) {
    const int64_t stride = place.extents.cols / 2;
    char* first = reinterpret_cast<char*>(p.row.data) + place.row * stride + place.col / 2;
    const Inside pairs{place.cols.begin / 2, place.cols.end / 2};
    uint32_t columns[kPatch] = {};
#pragma unroll
    for (int i = 0; i < kPatch; ++i, first += stride) {
      uint32_t codes = 0;
#pragma unroll
      for (int j = 0; j < kPatch; ++j) {
        const float value = patch.value(i, j), drawn = noise.at(i, j);
        uint32_t code = 0;
        if constexpr (kHasRow) code = encode(value * by_row[i], drawn);
        codes += code << (4 * j);
        if constexpr (kHasCol && !kSame) code = encode(value * by_col[j], drawn);
        columns[j] += code << (4 * i);
      }
      if constexpr (kHasRow) store_run<kPatch / 2, kRowStore>(first, pairs.only_if(place.rows.has(i)), &codes);
    }
    if constexpr (kHasCol) {
#pragma unroll
      for (int j = 0; j < kPatch; ++j) {
        shared.transposed[position(place.local_col + j, place.local_row)] = columns[j];
      }
    }
  }

  TE_DIST_DEVICE void write_transposed() const {
    const int64_t stride = place.extents.rows / 2;
#pragma unroll
    for (int i = 0; i < kPanel * kPanel / 32 / kThreads; ++i) {
      // Neighbouring lanes take the four chunks of a column; columns 8 apart lie in different banks.
      const int index = i * kThreads + threadIdx.x, chunk = index % 4;
      const int local_col = index / 64 + index / 4 % 16 * 8;
      const int64_t row = place.first_row() + chunk * 32, col = place.first_col() + local_col;
      uint32_t codes[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) codes[w] = shared.transposed[position(local_col, chunk * 32 + w * 8)];
      char* first = reinterpret_cast<char*>(p.col.data) + col * stride + row / 2;
      const Inside rows = Inside::of(row / 2, 16, stride);
      store_run<16, kColStore>(first, rows.only_if(col >= 0 && col < place.extents.cols), codes);
    }
  }

  TE_DIST_DEVICE void quantize() {
    tile_row = place.panel_row * (kPanel / kTile) + place.local_row / kTile;
    tile_col = place.panel_col * (kPanel / kTile) + place.local_col / kTile;
    touches_row = place.tile_has_rows(kTile);
    touches_col = place.tile_has_cols(kTile);
    load_patch<Source, kLoad>(p.source, place, patch);
    if constexpr (kStochastic) {
      const PhiloxState state{uint64_t(__ldg(p.rng_state)), uint64_t(__ldg(p.rng_state + 1))};
      noise.template draw<Rule::kRounding == Rounding::kStochasticAligned>(state, place);
    }
    float by_row[kPatch], by_col[kPatch];
    if constexpr (kRow == Share::kRun) settle_runs_of_rows(by_row);
    if constexpr (kRow == Share::kSquare) settle_square_by_rows(by_row);
    if constexpr (kCol == Share::kRun) settle_runs_of_columns(by_col);
    if constexpr (kCol == Share::kSquare) settle_square_by_columns(by_col);
    // Where squares have the same scale in both directions, as they have by their own amax, so have they the same codes.
    if (kRow == Share::kSquare && kCol == Share::kSquare && by_row[0] == by_col[0]) {
      write<true>(by_row, by_col);
    } else {
      write<false>(by_row, by_col);
    }
    __syncthreads();
    write_scales();
    if constexpr (kHasCol) write_transposed();
  }

  TE_DIST_INLINE void run(const Params& p, int64_t panel) {
    if (is_set(p.noop)) return;
    __shared__ Shared shared;
    QuantizeNvFp4{p, Place::of(p.extents, p.phase, panel), shared, {}, {}}.quantize();
  }

  TE_DIST_INLINE void run(const Params& p) { run(p, blockIdx.x); }
};

}  // namespace te_dist::cuda
