// NVFP4: 4-bit codes with an e4m3 scale byte for 16, or 16 x 16, values below one amax for the tensor (or for each row).
// Both directions in one launch; the second one finds the input in the cache.
#pragma once

#include "common/codes.cuh"
#include "common/four_over_six.cuh"
#include "common/noise.cuh"
#include "common/nvfp4_scale.cuh"
#include "common/runs.cuh"

namespace te_dist::cuda {

enum class Rounding { kNearest, kStochastic, kStochasticAligned };

// How values become codes.
//   kAmaxPerRow  every row has its own tensor amax, in the row direction
//   kTransforms  the column direction is that of the Hadamard transform
template <Rounding kRounding_, FourOverSix kFourOverSix_, bool kAmaxPerRow_, bool kTransforms_>
struct NvFp4Rule {
  static constexpr bool kAmaxPerRow = kAmaxPerRow_;
  static constexpr bool kTransforms = kTransforms_;
  static constexpr Rounding kRounding = kRounding_;
  static constexpr FourOverSix kFourOverSix = kFourOverSix_;
};

// kLoad, kRowStore, kColStore: bytes that can be read and written at a time. kRowScaleStore, kColScaleStore: the same of the
// scale bytes of one row, or column; 0 where they do not lie beside each other.
template <class Source, class Rule, Share kRow, Share kCol, int kLoad, int kRowStore, int kColStore, int kRowScaleStore,
          int kColScaleStore, class Panels>
struct QuantizeNvFp4 {
  using Element = typename Source::Element;
  static constexpr bool kHasRow = kRow != Share::kAbsent, kHasCol = kCol != Share::kAbsent;
  static constexpr bool kStochastic = Rule::kRounding != Rounding::kNearest;
  static constexpr bool kChooses = Rule::kFourOverSix != FourOverSix::kNone;
  // The errors of a square are summed along rows.
  static constexpr bool kChoosesByRows = kChooses && kCol == Share::kSquare;
  static constexpr int kThreads = kPanelThreads;
  static constexpr int kBlocks =
      Element::kPerWord == 1 || kLoad < 8                                          ? 2
      : kStochastic || kChooses || Rule::kTransforms || Source::kIsComputed ? 3
                                                                                   : 4;
  static_assert(!(kChooses && Rule::kTransforms), "errors are those of the values themselves");
  static constexpr int kTiles = kPanel / kRun;  // side by side in a panel

  using RowStrip = Strip<Element, true>;
  using Errors = DecodeErrors<Rule::kFourOverSix>;

  struct Params {
    typename Source::Params source;
    Extents extents;
    Panels panels;
    const uint32_t* noop;
    PanelGrid grid;
    float e4m3_max;
    uint32_t sign_mask;                   // of the transform
    int32_t col_rng_state;                // where in `rng_state` that of the column direction begins
    const int64_t* rng_state;             // (seed, offset)
    Plane<const float> row_tensor_amax;   // row stride 0: one for the tensor; of groups: else one for each
    Plane<const float> col_tensor_amax;
    BlockOutput<uint8_t> row;  // data (rows, cols / 2)
    BlockOutput<uint8_t> col;  // data (cols, rows / 2), of groups (cols, rows of all tiles / 2)
  };

  // What becomes lines of the outputs, written when all of the panel is there, and what the directions share.
  struct Shared {
    alignas(16) uint4 columns[kHasCol ? kPanel * kPanel / 32 : 1];  // codes of pairs of columns
    uint4 noise[kStochastic ? kPanel : 1][kTiles];
    Scale squares[kChoosesByRows ? kTiles : 1][kTiles];
    float sums[Source::kHasSums ? kWarps : 1][kPanel];
    alignas(8) uint8_t row_scales[kHasRow ? kPanel : 1][kTiles];
    alignas(8) uint8_t col_scales[kHasCol ? kPanel : 1][kTiles];
  };

  const Params& p;
  const Panel panel;
  Shared& shared;

  // A strip on its way through one direction.
  template <class Strip>
  struct Tiles {
    static constexpr bool kAlongRows = Strip::kRows == kRuns;
    static constexpr Share kShare = kAlongRows ? kRow : kCol;

    const Params& p;
    const Panel& panel;
    const Strip& strip;
    const BlockOutput<uint8_t>& output;
    const Plane<const float>& tensor_amax;
    int64_t tile_row, tile_col;  // in the grid of the matrix
    bool square_is_inside;       // whether the square around the strip has an element in the matrix

    TE_DIST_DEVICE Tiles(const Params& p, const Panel& panel, const Strip& strip, bool is_row)
        : p(p), panel(panel), strip(strip), output(is_row ? p.row : p.col),
          tensor_amax(is_row ? p.row_tensor_amax : p.col_tensor_amax) {
      tile_row = (panel.row + panel.phase.row + strip.local_row) / kRun;
      tile_col = (panel.col + panel.phase.col + strip.local_col) / kRun;
      // Rows that a group is padded with are tiles like others.
      square_is_inside = (Panels::kIsGrouped || meets(panel.rows, strip.local_row)) && meets(panel.cols, strip.local_col);
    }

    TE_DIST_INLINE bool meets(const Inside& inside, int local) {
      return inside.begin < local / kRun * kRun + kRun && inside.end > local / kRun * kRun;
    }

    TE_DIST_DEVICE bool run_is_inside(int run) const { return square_is_inside && strip.has(run); }

    TE_DIST_DEVICE TensorScale scale_of_run(int run) const {
      const float* amax = tensor_amax.data;
      if constexpr (Panels::kIsGrouped) return TensorScale::of(tensor_amax.at(panel.group, 0), p.e4m3_max);
      if (!kAlongRows || !Rule::kAmaxPerRow) return TensorScale::of(*amax, p.e4m3_max);
      const bool is_inside = run_is_inside(run);
      return TensorScale::of(is_inside ? amax[(strip.row + run) * tensor_amax.row_stride] : 0.0f, p.e4m3_max);
    }

    TE_DIST_DEVICE TensorScale scale_of_square() const {
      const int64_t row = Panels::kIsGrouped ? panel.group : panel.row + strip.local_row / kRun * kRun;
      return TensorScale::of(square_is_inside ? tensor_amax.at(row > 0 ? row : 0, 0) : 0.0f, p.e4m3_max);
    }

    TE_DIST_DEVICE void settle_runs(const float (&own)[kRuns], Scale (&scales)[kRuns]) const {
      float amax[kRuns] = {own[0], own[1], own[2], own[3]};
      if (__builtin_expect(output.amax.data != nullptr, 0)) {
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
          if (!run_is_inside(run)) continue;
          amax[run] = kAlongRows ? output.amax.at(strip.row + run, tile_col) : output.amax.at(tile_row, strip.col + run);
        }
      }
      float units[kRuns];
      bool is_ordinary = true;
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        const TensorScale tensor = scale_of_run(run);
        if constexpr (kChooses) {
          scales[run] = chosen(amax[run], tensor, [&](const Errors& errors) { return sum_of_run(run, errors); });
        } else {
          scales[run].code = tensor.code(amax[run]);
          units[run] = tensor.unit(scales[run].code);
          is_ordinary = is_ordinary && tensor.is_ordinary();
        }
      }
      if constexpr (!kChooses) find_multipliers(units, is_ordinary, scales);
    }

    TE_DIST_DEVICE Scale settle_square(const float (&of_runs)[kRuns]) const {
      float amax = fmaxf(fmaxf(of_runs[0], of_runs[1]), fmaxf(of_runs[2], of_runs[3]));
      amax = larger_of_lanes(larger_of_lanes(amax, Strip::kSquareLanes[0]), Strip::kSquareLanes[1]);
      if (__builtin_expect(output.amax.data != nullptr, 0) && square_is_inside) amax = output.amax.at(tile_row, tile_col);
      const TensorScale tensor = scale_of_square();
      if constexpr (kChooses) return chosen(amax, tensor, [&](const Errors& errors) { return sum_of_square(errors); });
      Scale scales[1] = {{tensor.code(amax)}};
      find_multipliers({tensor.unit(scales[0].code)}, tensor.is_ordinary(), scales);
      return scales[0];
    }

    // Of the two ways to scale a tile the one that loses less; the largest value becomes 6 where they tie.
    template <class SumOf>
    TE_DIST_DEVICE Scale chosen(float amax, const TensorScale& tensor, const SumOf& sum_of) const {
      Scale scales[2];
      float units[2], sums[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        scales[c].code = nvfp4_four_over_six_code(amax, tensor.scale, c ? 1.5f : 1.0f);
        units[c] = tensor.unit(scales[c].code);
      }
      find_multipliers(units, tensor.is_ordinary(), scales);
#pragma unroll
      for (int c = 0; c < 2; ++c) sums[c] = sum_of(Errors(scales[c].code, scales[c].multiplier, tensor.amax, p.e4m3_max));
      return sums[1] < sums[0] ? scales[1] : scales[0];
    }

    TE_DIST_DEVICE float sum_of_run(int run, const Errors& errors) const {
      float sum = 0.0f;
      if (Errors::is_ordinary(errors.tensor_amax)) {
#pragma unroll
        for (int i = 0; i < kRun; ++i) sum += errors.ordinary(fabsf(strip.value(run, i)));
      } else {
        float values[kRun];  // not in registers: a loop is short, and this is rare
#pragma unroll
        for (int i = 0; i < kRun; ++i) values[i] = strip.value(run, i);
        const Inside inside = (kAlongRows ? strip.cols : strip.rows).only_if(strip.has(run));
#pragma unroll 1
        for (int i = 0; i < kRun; ++i) {
          if (inside.has(i)) sum += errors.any(values[i]);
        }
      }
      return sum;
    }

    // Every row from left to right, then rows folded in halves.
    TE_DIST_DEVICE float sum_of_square(const Errors& errors) const {
      float rows[kRuns];
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        rows[run] = sum_of_run(run, errors);
        rows[run] += __shfl_xor_sync(kFullWarp, rows[run], Strip::kSquareLanes[1]);
        rows[run] += __shfl_xor_sync(kFullWarp, rows[run], Strip::kSquareLanes[0]);
      }
      return (rows[0] + rows[2]) + (rows[1] + rows[3]);
    }
  };

  // Largest magnitudes of the runs; what is not a number does not count, and is infinite afterwards. False if there was any.
  template <class Strip>
  TE_DIST_INLINE bool find_amax(Strip& strip, float (&amax)[kRuns]) {
    strip.amax_or_nan(amax);
    const float all = (amax[0] + amax[1]) + (amax[2] + amax[3]);
    if (all == all) return true;
    strip.amax(amax);
    strip.replace_nan();
    return false;
  }

  // Codes to nearest. kBelow7: every element times its multiplier is.
  template <bool kBelow7, class Strip>
  TE_DIST_INLINE void encode_sizes(const Strip& strip, const Scale (&scales)[kRuns], uint32_t (&codes)[kRuns][2]) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        codes[run][half] = 0;
#pragma unroll
        for (int i = 7; i >= 0; --i) {
          const float size = fabsf(strip.value(run, 8 * half + i)) * scales[run].multiplier;
          push_code(codes[run][half], round_e2m1<kBelow7>(size, i));
        }
      }
    }
  }

  // Codes of elements `first` and two behind it, as `round_e2m1_noisy` has them.
  template <class Strip, class Noise>
  TE_DIST_INLINE uint32_t encode_pair_noisy(const Strip& strip, int run, int first, float multiplier, const Noise& noise) {
    const float low = fabsf(strip.value(run, first)) * multiplier, high = fabsf(strip.value(run, first + 2)) * multiplier;
    return round_e2m1_noisy(places_in_e2m1(low, high), noise(run, first));
  }

  // Codes rounded stochastically.
  template <class Strip, class Noise>
  TE_DIST_INLINE void encode_noisy(const Strip& strip, const Scale (&scales)[kRuns], const Noise& noise,
                                   uint32_t (&codes)[kRuns][2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t bytes[2][kRuns];  // of even and of odd elements
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
          const int first = 8 * half + odd;
          const uint32_t left = encode_pair_noisy(strip, run, first, scales[run].multiplier, noise);
          const uint32_t right = encode_pair_noisy(strip, run, first + 4, scales[run].multiplier, noise);
          bytes[odd][run] = gathered(left, right, 0x7531);
        }
      }
#pragma unroll
      for (int run = 0; run < kRuns; ++run) codes[run][half] = (bytes[0][run] >> 1) + (bytes[1][run] << 3);
    }
  }

  // `amax`: of the strip's own runs, unless it had NaN. `noise`: of a pair of a run, as `round_e2m1_noisy` takes it.
  template <class Strip, class Noise>
  TE_DIST_INLINE void encode(const Strip& strip, const float (&amax)[kRuns], bool has_amax, const Scale (&scales)[kRuns],
                             const Noise& noise, uint32_t (&codes)[kRuns][2]) {
    float largest = 0.0f;
#pragma unroll
    for (int run = 0; run < kRuns; ++run) largest = fmaxf(largest, amax[run] * scales[run].multiplier);
    if constexpr (kStochastic) {
      encode_noisy(strip, scales, noise, codes);
    } else if (__builtin_expect(has_amax && largest < 7.0f, 1)) {
      encode_sizes<true>(strip, scales, codes);
    } else {
      encode_sizes<false>(strip, scales, codes);
    }
    Signs signs[kRuns][2];
    strip.find_signs(signs);
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
#pragma unroll
      for (int half = 0; half < 2; ++half) codes[run][half] = signs[run][half].joined(codes[run][half]);
    }
  }

  TE_DIST_DEVICE void quantize_rows() const {
    RowStrip strip(panel);
    if constexpr (kHasRow || kChoosesByRows) strip.template load<Source, kLoad>(p.source, panel);
    if constexpr (kStochastic) put_noise(strip, kHasRow ? 0 : p.col_rng_state);
    if constexpr (!kHasRow && !kChoosesByRows) return;
    float amax[kRuns];
    const bool has_amax = find_amax(strip, amax);
    if constexpr (kChoosesByRows) {
      const Scale scale = Tiles<RowStrip>(p, panel, strip, false).settle_square(amax);
      shared.squares[strip.local_row / kRun][strip.local_col / kRun] = scale;
    }
    if constexpr (kHasRow) write_rows(strip, amax, has_amax);
    if constexpr (kStochastic && kHasRow && kHasCol) {
      if (p.col_rng_state != 0) put_noise(strip, p.col_rng_state);
    }
  }

  // Draws the bytes of a strip from the stream whose state begins at `state`.
  TE_DIST_DEVICE void put_noise(const RowStrip& strip, int state) const {
    uint4 noise[kRuns];
    draw_noise<Rule::kRounding == Rounding::kStochasticAligned>(p.rng_state + state, strip, p.extents.cols, noise);
#pragma unroll
    for (int run = 0; run < kRuns; ++run) shared.noise[strip.local_row + run][strip.local_col / kRun] = noise[run];
    __syncwarp();  // the compiler would keep them in registers
  }

  TE_DIST_DEVICE void write_rows(const RowStrip& strip, const float (&amax)[kRuns], bool has_amax) const {
    const Tiles<RowStrip> tiles(p, panel, strip, true);
    Scale scales[kRuns];
    if constexpr (kRow == Share::kRun) {
      tiles.settle_runs(amax, scales);
    } else {
      const Scale scale = tiles.settle_square(amax);
#pragma unroll
      for (int run = 0; run < kRuns; ++run) scales[run] = scale;
    }
    uint32_t codes[kRuns][2];
    encode(strip, amax, has_amax, scales, [&](int run, int first) {
      const uint4* noise = &shared.noise[strip.local_row + run][strip.local_col / kRun];
      return doubled_bytes(reinterpret_cast<const uint32_t*>(noise)[first / 4], first % 2);
    }, codes);
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      shared.row_scales[strip.local_row + run][strip.local_col / kRun] = uint8_t(scales[run].code);
    }
    const int64_t stride = p.extents.cols / 2;
    char* first = reinterpret_cast<char*>(p.row.data) + strip.row * stride + strip.col / 2;
    if (panel.is_whole) {
#pragma unroll
      for (int run = 0; run < kRuns; ++run, first += stride) {
        store_run<kRun / 2, kRowStore>(first, {0, kRun / 2}, codes[run]);
      }
    } else {
      const Inside pairs{strip.cols.begin / 2, strip.cols.end / 2};
#pragma unroll
      for (int run = 0; run < kRuns; ++run, first += stride) {
        store_run<kRun / 2, kRowStore>(first, pairs.only_if(strip.rows.has(run)), codes[run]);
      }
    }
  }

  // Place in shared memory of the codes of two columns, `pair` of the four of a lane, in the 16 rows of a warp. Threads
  // that write, or read, at a time find different banks.
  TE_DIST_INLINE int position(int warp, int pair, int lane) { return warp * 64 + pair * 32 + (lane ^ warp / 2 * 2); }

  TE_DIST_DEVICE void quantize_columns() const {
    Strip<Element, false> strip(panel);
    strip.template load<Source, kLoad>(p.source, panel);
    if constexpr (Panels::kIsGrouped && Source::kIsComputed) strip.keep_rows();
    if constexpr (Source::kHasSums) add_columns(strip);
    if constexpr (!kHasCol) return;
    if constexpr (Rule::kTransforms) {
      Strip<BFloat16, false> transformed = in_bfloat16(strip);
      transform_words(transformed.words, p.sign_mask, [&](int w, float (&values)[kMixedRows][2]) {
#pragma unroll
        for (int i = 0; i < kMixedRows; ++i) {
          transformed.words[i][w] = BFloat16::store_pair(values[i][0] * 0.25f, values[i][1] * 0.25f);
        }
      });
      quantize_columns_of(transformed);
    } else {
      quantize_columns_of(strip);
    }
  }

  // In the order of `Summed`.
  TE_DIST_DEVICE void add_columns(const Strip<Element, false>& strip) const {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      float halves[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        halves[half] = strip.value(run, half * kPatch);
#pragma unroll
        for (int i = 1; i < kPatch; ++i) halves[half] += strip.value(run, half * kPatch + i);
      }
      shared.sums[threadIdx.x / 32][strip.local_col + run] = halves[0] + halves[1];
    }
  }

  TE_DIST_DEVICE void write_sums() const {
    const int col = threadIdx.x;
    if (col >= kPanel || !panel.cols.has(col)) return;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += shared.sums[w][col];
    p.source.sums[(panel.row + panel.phase.row) / kPanel * p.extents.cols + panel.col + col] = total;
  }

  template <class ColStrip>
  TE_DIST_DEVICE void quantize_columns_of(ColStrip& strip) const {
    float amax[kRuns];
    const bool has_amax = find_amax(strip, amax);
    const Tiles<ColStrip> tiles(p, panel, strip, false);
    Scale scales[kRuns];
    if constexpr (kCol == Share::kRun) {
      tiles.settle_runs(amax, scales);
    } else {
      Scale scale;
      if constexpr (kChoosesByRows) {
        scale = shared.squares[strip.local_row / kRun][strip.local_col / kRun];
      } else {
        scale = tiles.settle_square(amax);
      }
#pragma unroll
      for (int run = 0; run < kRuns; ++run) scales[run] = scale;
    }
    uint32_t codes[kRuns][2];
    encode(strip, amax, has_amax, scales, [&](int run, int first) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(shared.noise[strip.local_row + first]) + strip.local_col / 4;
      return doubled_bytes(gathered(words[0], words[2 * kPanel / 4], run % 2 ? 0x7531 : 0x6420), run / 2);
    }, codes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int pair = 0; pair < kRuns / 2; ++pair) {
      const uint32_t(&left)[2] = codes[2 * pair], (&right)[2] = codes[2 * pair + 1];
      shared.columns[position(warp, pair, lane)] = make_uint4(left[0], left[1], right[0], right[1]);
    }
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      shared.col_scales[strip.local_col + run][strip.local_row / kRun] = uint8_t(scales[run].code);
    }
  }

  // Writes the codes of whole columns of the panel: neighbouring lanes take the four chunks of 32 rows of a column.
  TE_DIST_DEVICE void write_columns() const {
    const int64_t stride = p.panels.col_rows(p.extents) / 2, first_row = Panels::col_row(panel, panel.row);
    const uint2* halves = reinterpret_cast<const uint2*>(shared.columns);
    const int lane = threadIdx.x % 32, chunk = lane % 4, second = lane / 4 % 2, pair = lane / 16;
#pragma unroll
    for (int i = 0; i < kPanel * 4 / kThreads; ++i) {
      const int owner = (i * kThreads / 32 + threadIdx.x / 32) * 2 + lane / 8 % 2;
      const int64_t row = first_row + chunk * 32, col = panel.col + owner * 4 + pair * 2 + second;
      uint2 codes[2];
#pragma unroll
      for (int w = 0; w < 2; ++w) codes[w] = halves[position(2 * chunk + w, pair, owner) * 2 + second];
      const uint32_t words[4] = {codes[0].x, codes[0].y, codes[1].x, codes[1].y};
      char* first = reinterpret_cast<char*>(p.col.data) + col * stride + row / 2;
      const Inside rows = Inside::of(row / 2, 16, stride);
      store_run<16, kColStore>(first, rows.only_if(col >= 0 && col < p.extents.cols), words);
    }
  }

  // Writes the kTiles scale bytes of one row, or column, of the panel: half of the threads take rows, half columns.
  TE_DIST_DEVICE void write_scales() const {
    const int line = threadIdx.x % kPanel;
    if (kHasRow && threadIdx.x < kPanel) {
      const int64_t row = panel.row + line, first = (panel.col + panel.phase.col) / kRun;
      const Inside inside = Inside::of(first, kTiles, (panel.phase.col + p.extents.cols + kRun - 1) / kRun);
      write_line<kRowScaleStore>(shared.row_scales[line], &p.row.scale.at(row, first), p.row.scale.col_stride,
                                 inside.only_if(panel.rows.has(line)));
    }
    if (kHasCol && threadIdx.x >= kPanel) {
      const int64_t col = panel.col + line, first = (panel.row + panel.phase.row) / kRun;
      const Inside inside = Inside::of(first, kTiles, (p.panels.tiled_rows(panel) + kRun - 1) / kRun);
      write_line<kColScaleStore>(shared.col_scales[line], &p.col.scale.at(first, col), p.col.scale.row_stride,
                                 inside.only_if(panel.cols.has(line)));
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

  TE_DIST_INLINE void run(const Params& p, int64_t index) {
    if (is_set(p.noop)) return;
    __shared__ Shared shared;
    const QuantizeNvFp4 self{p, Panel::of(p.extents, p.panels, p.grid, uint32_t(index)), shared};
    if (Panels::kIsGrouped && self.panel.rows.is_empty()) return;  // there are blocks for as many as groups may have
    if constexpr (kHasRow || kStochastic || kChoosesByRows) self.quantize_rows();
    if constexpr (kHasCol && (kStochastic || kChoosesByRows)) __syncwarp();  // both directions of 16 rows are one warp's
    if constexpr (kHasCol || Source::kHasSums || Source::kHasRowSums) self.quantize_columns();
    __syncthreads();
    self.write_scales();
    if constexpr (Source::kHasSums) self.write_sums();
    if constexpr (kHasCol) self.write_columns();
  }

  TE_DIST_INLINE void run(const Params& p) { run(p, blockIdx.x); }
};

}  // namespace te_dist::cuda
