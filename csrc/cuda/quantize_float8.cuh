// FP8 with one scale for the tensor, or one for a tile of 128 or 128 x 128. Both directions in one pass over the input.
#pragma once

#include "common/codes.cuh"
#include "common/overlap.cuh"
#include "common/panels.cuh"
#include "common/source.cuh"

namespace te_dist::cuda {

// Where the multiplier of a whole tensor comes from: it is known, or follows from the largest of some amaxes. Of groups:
// from one for all of them, or from that of each.
struct TensorScale {
  const float* multiplier;  // null where it is not known
  const float* amaxes;      // written by the kernel in front
  int64_t count;            // of the amaxes; of groups, of the multipliers as well: one, or as many as groups
  float* amax;  // beside a known one: raised to the largest magnitude where it is not null
};

// kLoad, kRowStore, kColStore: bytes that can be read and written at a time.
template <class Source, class Code, Share kRow, Share kCol, int kLoad, int kRowStore, int kColStore, class Panels,
          class Lanes>
struct QuantizeFloat8 {
  using Element = typename Source::Element;
  static constexpr int kThreads = kPanelThreads;
  static constexpr bool kIsNarrow = Element::kPerWord == 2 && kLoad >= 8;
  static constexpr int kBlocks = !kIsNarrow || Source::kIsPaired ? 2 : Source::kIsComputed ? 3 : 4;
  static constexpr bool kHasRow = kRow != Share::kAbsent, kHasCol = kCol != Share::kAbsent;
  static constexpr bool kIsTensor = kRow == Share::kTensor || kCol == Share::kTensor;
  static constexpr bool kHasSquare = kRow == Share::kSquare || kCol == Share::kSquare;

  struct Params {
    typename Source::Params source;
    Extents extents;
    Panels panels;
    const uint32_t* noop;
    TensorScale tensor;  // of kTensor
    float eps;
    int32_t pow2;
    BlockOutput<float> row;  // data (rows, cols)
    BlockOutput<float> col;  // data (cols, rows), of groups (cols, rows of all tiles)
  };

  static constexpr bool kHasSquares = !kIsTensor || Panels::kIsGrouped || Source::kHasSums || Source::kHasRowSums;
  static_assert(!kHasSquares || Lanes::kRows == kPanel, "tiles, those of groups, and sums are those of square panels");
  static constexpr int kChunks = Lanes::kRows / 16;  // of 16 codes, of a column

  struct Shared {
    float columns[kCol == Share::kRun ? kWarps : 1][kPanel];  // their amaxes in the rows of each warp
    float multipliers[kPanel];                                // of the columns
    float of_warps[kWarps];                                   // amax of each warp
    alignas(16) uint8_t transposed[kHasCol ? Lanes::kRows * Lanes::kCols : 1];
  };

  using Rows = SharedOut<16, 8, 4, 2>;

  const Params& p;
  const View view;
  const Place place;
  Shared& shared;
  Patch<Element> patch;

  TE_DIST_DEVICE FloatScaleRule rule(float value_for_inf) const {
    return {float_of(Code::kClamp), p.eps, value_for_inf, p.pow2 != 0};
  }

  // Multiplier of a tile from its amax, found or given; one thread stores the inverse.
  TE_DIST_DEVICE float scale(const BlockOutput<float>& output, float amax, int64_t row, int64_t col, bool writes) const {
    if (output.amax.data) amax = output.amax.at(row, col);
    const float multiplier = scale_from_amax(amax, rule(Element::kMaxFinite));
    if (writes) output.scale.at(row, col) = 1.0f / multiplier;
    return multiplier;
  }

  TE_DIST_DEVICE float square_scale(const BlockOutput<float>& output, float amax) const {
    return scale(output, amax, place.panel_row, place.panel_col, threadIdx.x == 0);
  }

  // Amaxes come late: the matrix, which the kernel in front does not write, is read meanwhile.
  TE_DIST_DEVICE float tensor_scale() {
    if (Panels::kIsGrouped) return group_scale(own_scale());
    if (p.tensor.multiplier) return *p.tensor.multiplier;
    wait_for_previous();
    if (p.tensor.count == 1) return scale_from_amax(*p.tensor.amaxes, rule(kFloatMax));
    float amax = 0.0f;
    for (int i = threadIdx.x; i < p.tensor.count; i += kThreads) amax = fmaxf(amax, __ldcg(p.tensor.amaxes + i));
    return scale_from_amax(largest_of_block(amax, shared.of_warps), rule(kFloatMax));
  }

  // Which of the multipliers of groups is this panel's.
  TE_DIST_DEVICE int own_scale() const { return p.tensor.count == 1 ? 0 : view.group; }

  TE_DIST_DEVICE float group_scale(int index) const {
    if (p.tensor.multiplier) return p.tensor.multiplier[index];
    wait_for_previous();
    return scale_from_amax(p.tensor.amaxes[index], rule(kFloatMax));
  }

  // Those of empty groups too, which no panel belongs to.
  TE_DIST_DEVICE void write_group_scales() const {
    for (int i = threadIdx.x; i < p.tensor.count; i += kThreads) {
      const float inverse = 1.0f / group_scale(i);
      if (p.row.scale.data) p.row.scale.data[i] = inverse;
      if (p.col.scale.data) p.col.scale.data[i] = inverse;
    }
  }

  TE_DIST_DEVICE void write_tensor_scale(float multiplier) const {
    if (place.panel_row != 0 || place.panel_col != 0 || threadIdx.x != 0) return;
    if (p.row.scale.data) *p.row.scale.data = 1.0f / multiplier;
    if (p.col.scale.data) *p.col.scale.data = 1.0f / multiplier;
  }

  TE_DIST_DEVICE char* first_code() const {
    return reinterpret_cast<char*>(p.row.data) + place.row * place.extents.cols + place.col;
  }

  TE_DIST_DEVICE void write_row(char* first, int i, float multiplier) const {
    float values[kPatch], multipliers[kPatch];
    uint32_t codes[2];
    patch.row(i, values);
    fill(multipliers, multiplier);
    encode_eight<Code>(values, multipliers, codes);
    store_run<kPatch, kRowStore>(first, place.cols.only_if(place.rows.has(i)), codes);
  }

  TE_DIST_DEVICE void write_runs() {
    float amax[kPatch], multipliers[Rows::kOwned];
    patch.row_amax(amax);
    Rows::largest(amax, multipliers);
    const int own = Rows::first();
    if (place.rows.has(own)) {
      multipliers[0] = scale(p.row, multipliers[0], place.row + own, place.panel_col, Rows::writes());
    }
    char* first = first_code();
#pragma unroll
    for (int i = 0; i < kPatch; ++i, first += place.extents.cols) write_row(first, i, Rows::of(multipliers, i));
  }

  TE_DIST_DEVICE void write_rows(float multiplier) {
    if constexpr (kRow == Share::kRun) {
      write_runs();
    } else if constexpr (kHasRow) {
      char* first = first_code();
#pragma unroll
      for (int i = 0; i < kPatch; ++i, first += place.extents.cols) write_row(first, i, multiplier);
    }
  }

  // Multipliers of the columns, one column to a thread.
  TE_DIST_DEVICE void scale_columns() {
    if (threadIdx.x >= kPanel) return;
    const int64_t col = place.first_col() + threadIdx.x;
    float amax = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) amax = fmaxf(amax, shared.columns[w][threadIdx.x]);
    if (col >= 0 && col < place.extents.cols) {
      shared.multipliers[threadIdx.x] = scale(p.col, amax, place.panel_row, col, true);
    }
  }

  // Position in shared memory of 16 rows of codes of a column. Threads that write, or read, at a time find different banks.
  TE_DIST_INLINE int position(int col, int chunk) {
    constexpr int kWarpChunks = Lanes::kWarpRows / 16;
    return col * Lanes::kRows + (chunk ^ (col / kPatch * kWarpChunks & 7)) * 16;
  }

  TE_DIST_DEVICE void transpose_codes(float multiplier) {
    float of_cols[kPatch];
    if constexpr (kCol == Share::kRun) load_shared(&shared.multipliers[place.local_col], of_cols);
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      float values[kPatch], multipliers[kPatch];
      uint32_t codes[2];
      patch.column(j, values);
      fill(multipliers, kCol == Share::kRun ? of_cols[j] : multiplier);
      encode_eight<Code>(values, multipliers, codes);
      const int at = position(place.local_col + j, place.local_row / 16) + place.local_row % 16;
      *reinterpret_cast<uint2*>(&shared.transposed[at]) = make_uint2(codes[0], codes[1]);
    }
  }

  TE_DIST_INLINE void load_shared(const float* source, float (&values)[kPatch]) {
    const float4 a = *reinterpret_cast<const float4*>(source), b = *reinterpret_cast<const float4*>(source + 4);
    values[0] = a.x, values[1] = a.y, values[2] = a.z, values[3] = a.w;
    values[4] = b.x, values[5] = b.y, values[6] = b.z, values[7] = b.w;
  }

  TE_DIST_DEVICE void write_transposed() const {
    const int chunk = threadIdx.x % kChunks, first_col = threadIdx.x / kChunks, step = kThreads / kChunks;
    const int64_t pitch = p.panels.col_rows(place.extents);
    const int64_t row = Panels::col_row(view, place.first_row()) + chunk * 16, col = place.first_col() + first_col;
    const Inside rows = Inside::of(row, 16, pitch);
    char* first = reinterpret_cast<char*>(p.col.data) + col * pitch + row;
#pragma unroll
    for (int i = 0; i < Lanes::kCols / step; ++i, first += step * pitch) {
      const uint4 v = *reinterpret_cast<const uint4*>(&shared.transposed[position(first_col + i * step, chunk)]);
      const uint32_t codes[4] = {v.x, v.y, v.z, v.w};
      const bool is_inside = col + i * step >= 0 && col + i * step < place.extents.cols;
      store_run<16, kColStore>(first, rows.only_if(is_inside), codes);
    }
  }

  TE_DIST_DEVICE void encode() {
    float by_row = 0.0f, by_col = 0.0f, recorded = 0.0f;  // multipliers of what is no run, amax of the panel
    if constexpr (kCol == Share::kRun) patch.share_col_amax(place, shared.columns);
    if constexpr (kHasSquare) {
      const float amax = largest_of_block(patch.amax(), shared.of_warps);
      if constexpr (kRow == Share::kSquare) by_row = square_scale(p.row, amax);
      if constexpr (kCol == Share::kSquare) by_col = square_scale(p.col, amax);
    } else if constexpr (kCol == Share::kRun) {
      __syncthreads();
    }
    if constexpr (kIsTensor) {
      if (p.tensor.amax) recorded = largest_of_block(patch.amax(), shared.of_warps);
      by_row = by_col = tensor_scale();
      if constexpr (!Panels::kIsGrouped) write_tensor_scale(by_row);
    }
    if constexpr (kCol == Share::kRun) scale_columns();
    write_rows(by_row);
    if constexpr (kHasCol) {
      patch.keep_packed();
      if constexpr (kCol == Share::kRun) __syncthreads();
      transpose_codes(by_col);
      __syncthreads();
      write_transposed();
    }
    if constexpr (kIsTensor) {
      const int index = Panels::kIsGrouped ? own_scale() : 0;
      if (p.tensor.amax && threadIdx.x == 0) raise_amax(p.tensor.amax + index, recorded);
    }
  }

  TE_DIST_INLINE void run(const Params& p, int64_t panel) {
    if (is_set(p.noop)) return;
    __shared__ Shared shared;
    const View view = view_of<Source::kIsPaired, Lanes>(p.panels, p.extents, panel);
    QuantizeFloat8 self{p, view, place_of<Source::kIsPaired, Lanes>(view, panel), shared, {}};
    if constexpr (Panels::kIsGrouped) {
      if (kIsTensor && panel == 0) self.write_group_scales();
      if (self.place.first_row() >= view.extents.rows) return;  // there are blocks for as many panels as groups may have
    }
    if constexpr (Source::kIsPaired) {
      with_pair<Source, kLoad, Panels::kIsGrouped, Lanes>(
          p.source, self.place, [&](const Place& at, const Patch<Element>& patch) {
            QuantizeFloat8{p, view, at, shared, patch}.encode();
          });
    } else {
      load_patch<Source, kLoad, Panels::kIsGrouped>(p.source, self.place, self.patch);
      self.encode();
    }
  }

  // A tensor whose amax has just been found is walked backwards: its end is still in the L2 cache.
  TE_DIST_INLINE void run(const Params& p) { run(p, kIsTensor ? gridDim.x - 1 - blockIdx.x : blockIdx.x); }
};

}  // namespace te_dist::cuda
