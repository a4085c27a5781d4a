// NVFP4: 4-bit codes with an e4m3 scale byte for 16, or 16 x 16, values below one amax for the tensor (or for each row).
// Both directions in one launch; the second one finds the input in the cache.
#pragma once

#include "common/codes.cuh"
#include "common/four_over_six.cuh"
#include "common/noise.cuh"
#include "common/nvfp4_encode.cuh"
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
  static constexpr bool kAmaxPerRow = Rule::kAmaxPerRow && !Panels::kIsGrouped;
  static constexpr bool kChooses = Rule::kFourOverSix != FourOverSix::kNone;
  // The errors of a square are summed along rows.
  static constexpr bool kChoosesByRows = kChooses && kCol == Share::kSquare;
  static constexpr int kThreads = kPanelThreads;
  static constexpr int kBlocks =
      Element::kPerWord == 1 || kLoad < 8                                          ? 2
      : kStochastic || kChooses || Rule::kTransforms || Source::kIsComputed ? 3
                                                                                   : 4;
  static_assert(!(kChooses && Rule::kTransforms), "errors are those of the values themselves");
  static constexpr int kTiles = kPanel / kRun;            // side by side in a panel
  static constexpr int kScaleWords = kPanel / kRuns + 4;  // of a line of tiles, which begin in different banks

  using RowStrip = Strip<Element, true>;

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
    uint32_t row_scales[kHasRow ? kTiles : 1][kScaleWords];  // bytes of four rows
    uint32_t col_scales[kHasCol ? kTiles : 1][kScaleWords];
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
    Strip& strip;
    const BlockOutput<uint8_t>& output;
    const TensorScale tensor;  // where the panel has one
    TE_DIST_DEVICE Tiles(const QuantizeNvFp4& kernel, Strip& strip, const BlockOutput<uint8_t>& output,
                         const TensorScale& tensor)
        : p(kernel.p), panel(kernel.panel), strip(strip), output(output), tensor(tensor) {}

    // In the grid of the matrix.
    TE_DIST_DEVICE int64_t tile_row() const { return (panel.row + panel.phase.row + strip.local_row) / kRun; }
    TE_DIST_DEVICE int64_t tile_col() const { return (panel.col + panel.phase.col + strip.local_col) / kRun; }

    // Whether the square around the strip has an element in the matrix. Rows that a group is padded with are like others.
    TE_DIST_DEVICE bool square_is_inside() const {
      return (Panels::kIsGrouped || meets(panel.rows, strip.local_row)) && meets(panel.cols, strip.local_col);
    }

    TE_DIST_INLINE bool meets(const Inside& inside, int local) {
      return inside.begin < local / kRun * kRun + kRun && inside.end > local / kRun * kRun;
    }

    TE_DIST_DEVICE bool run_is_inside(int run) const { return square_is_inside() && strip.has(run); }

    // Of the row of the matrix that a run, or the first of a square, lies in.
    TE_DIST_DEVICE TensorScale scale_of_row(int64_t row, bool is_inside) const {
      return TensorScale::of(is_inside ? p.row_tensor_amax.at(row > 0 ? row : 0, 0) : 0.0f, p.e4m3_max);
    }

    TE_DIST_DEVICE TensorScale scale_of_run(int run) const {
      return kAlongRows && kAmaxPerRow ? scale_of_row(strip.row() + run, run_is_inside(run)) : tensor;
    }

    TE_DIST_DEVICE TensorScale scale_of_square() const {
      if (!kAmaxPerRow || &output != &p.row) return tensor;
      return scale_of_row(panel.row + strip.local_row / kRun * kRun, square_is_inside());
    }

    TE_DIST_DEVICE Choice<Rule::kFourOverSix, Strip> choice() const { return {strip, p.e4m3_max}; }

    TE_DIST_DEVICE void settle_runs(Largest& largest, Scale (&scales)[kRuns]) const {
      float(&amax)[kRuns] = largest.of_runs;
      const float own[kRuns] = {amax[0], amax[1], amax[2], amax[3]};
      if (__builtin_expect(output.amax.data != nullptr, 0)) {
        largest.bound = float_of(kInfinityBits);
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
          if (!run_is_inside(run)) continue;
          const int64_t row = kAlongRows ? strip.row() + run : tile_row(), col = kAlongRows ? tile_col() : strip.col() + run;
          amax[run] = output.amax.at(row, col);
        }
      }
      if constexpr (kChooses) {
        choice().of_runs(amax, own, [&](int run) { return scale_of_run(run); }, scales);
        return;
      }
      float units[kRuns];
      bool is_ordinary = true;
#pragma unroll
      for (int run = 0; run < kRuns; run += 2) {
        const TensorScale first = scale_of_run(run), second = scale_of_run(run + 1);
        const uint32_t codes = encode_pair<E4M3>(first.scaled(fabsf(amax[run])), second.scaled(fabsf(amax[run + 1])));
        const float2 decoded = decode_pair<E4M3>(codes);
        scales[run].code = codes & 0xFFu, scales[run + 1].code = codes >> 8;
        units[run] = decoded.x * first.inverse, units[run + 1] = decoded.y * second.inverse;
        is_ordinary = is_ordinary && first.is_ordinary() && second.is_ordinary();
      }
      find_multipliers(units, is_ordinary, scales);
    }

    TE_DIST_DEVICE Scale settle_square(const Largest& largest) const {
      const float(&of_runs)[kRuns] = largest.of_runs;
      const float own = fmaxf(fmaxf(fabsf(of_runs[0]), fabsf(of_runs[1])), fmaxf(fabsf(of_runs[2]), fabsf(of_runs[3])));
      float amax = larger_of_lanes(larger_of_lanes(own, Strip::kSquareLanes[0]), Strip::kSquareLanes[1]);
      if (__builtin_expect(output.amax.data != nullptr, 0) && square_is_inside()) {
        amax = output.amax.at(tile_row(), tile_col());
      }
      const TensorScale whole = scale_of_square();
      if constexpr (kChooses) return choice().of_square(amax, own, whole);
      Scale scales[1] = {{whole.code(amax)}};
      find_multipliers({whole.unit(scales[0].code)}, whole.is_ordinary(), scales);
      return scales[0];
    }
  };

  // Of all of a panel.
  TE_DIST_DEVICE float tensor_amax(const Plane<const float>& amaxes) const {
    return amaxes.data[Panels::kIsGrouped ? panel.group * amaxes.row_stride : 0];
  }

  // By columns: mostly the same as by rows.
  TE_DIST_DEVICE TensorScale col_tensor_scale(const TensorScale& by_rows) const {
    const float amax = tensor_amax(p.col_tensor_amax);
    constexpr bool kHasScale = kHasRow && !kAmaxPerRow && !kChooses;  // to choose takes the registers that one would keep
    if (kHasScale && bits_of(amax) == bits_of(by_rows.amax)) return by_rows;
    return TensorScale::of(amax, p.e4m3_max);
  }

  // Whether squares have the same scale in both directions, as it is found from the same.
  TE_DIST_DEVICE bool has_one_choice() const {
    if (kAmaxPerRow || p.row.amax.data != nullptr || p.col.amax.data != nullptr) return false;
    return bits_of(tensor_amax(p.row_tensor_amax)) == bits_of(tensor_amax(p.col_tensor_amax));
  }

  // Returns the scale of the tensor by rows.
  TE_DIST_DEVICE TensorScale quantize_rows() const {
    constexpr bool kHasScale = kHasRow && !kAmaxPerRow;
    const float whole_amax = kHasScale ? tensor_amax(p.row_tensor_amax) : 0.0f;
    RowStrip strip(panel);
    if constexpr (kHasRow || kChoosesByRows) strip.template load<Source, kLoad>(p.source);
    if constexpr (kStochastic) put_noise(strip, kHasRow ? 0 : p.col_rng_state);
    if constexpr (!kHasRow && !kChoosesByRows) return {};
    const TensorScale tensor = kHasScale ? TensorScale::of(whole_amax, p.e4m3_max) : TensorScale{};
    Largest largest = find_amax(strip);
    if constexpr (kChoosesByRows) {
      const Scale scale = Tiles<RowStrip>(*this, strip, p.col, col_tensor_scale(tensor)).settle_square(largest);
      shared.squares[strip.local_row / kRun][strip.local_col / kRun] = scale;
    }
    if constexpr (kHasRow) write_rows(strip, tensor, largest);
    if constexpr (kStochastic && kHasRow && kHasCol) {
      if (p.col_rng_state != 0) put_noise(strip, p.col_rng_state);
    }
    return tensor;
  }

  // Draws the bytes of a strip from the stream whose state begins at `state`.
  TE_DIST_DEVICE void put_noise(const RowStrip& strip, int state) const {
    uint4 noise[kRuns];
    draw_noise<Rule::kRounding == Rounding::kStochasticAligned>(p.rng_state + state, strip, p.extents.cols, noise);
#pragma unroll
    for (int run = 0; run < kRuns; ++run) shared.noise[strip.local_row + run][strip.local_col / kRun] = noise[run];
    __syncwarp();  // the compiler would keep them in registers
  }

  TE_DIST_DEVICE void write_rows(RowStrip& strip, const TensorScale& tensor, Largest& largest) const {
    const Tiles<RowStrip> tiles(*this, strip, p.row, tensor);
    Scale scales[kRuns];
    if constexpr (kRow == Share::kRun) {
      tiles.settle_runs(largest, scales);
    } else {
      const bool is_chosen = kChoosesByRows && has_one_choice();
      const Scale scale = is_chosen ? shared.squares[strip.local_row / kRun][strip.local_col / kRun] : tiles.settle_square(largest);
#pragma unroll
      for (int run = 0; run < kRuns; ++run) scales[run] = scale;
    }
    uint32_t codes[kRuns][2];
    encode<kStochastic>(strip, largest, scales, [&](int run, int first) {
      const uint4* noise = &shared.noise[strip.local_row + run][strip.local_col / kRun];
      return doubled_bytes(reinterpret_cast<const uint32_t*>(noise)[first / 4], first % 2);
    }, codes);
    shared.row_scales[strip.local_col / kRun][strip.local_row / kRuns] = packed(scales);
    char* data = reinterpret_cast<char*>(p.row.data);
    if (panel.is_whole) {
      const uint32_t stride = uint32_t(p.extents.cols) / 2;
      const Addresses<kRuns> rows(data + strip.template byte_in<1, 2>(stride), stride);
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        store_run<kRun / 2, kRowStore>(rows.at[run], {0, kRun / 2}, codes[run]);
      }
    } else {
      const int64_t stride = p.extents.cols / 2;
      char* first = data + strip.row() * stride + strip.col() / 2;
      const Inside rows = strip.rows(), cols = strip.cols(), pairs{cols.begin / 2, cols.end / 2};
#pragma unroll
      for (int run = 0; run < kRuns; ++run, first += stride) {
        store_run<kRun / 2, kRowStore>(first, pairs.only_if(rows.has(run)), codes[run]);
      }
    }
  }

  // Place in shared memory of the codes of two columns, `pair` of the four of a lane, in the 16 rows of a warp. Threads
  // that write, or read, at a time find different banks.
  TE_DIST_INLINE int position(int warp, int pair, int lane) { return warp * 64 + pair * 32 + (lane ^ warp / 2 * 2); }

  TE_DIST_DEVICE void quantize_columns(const TensorScale& by_rows) const {
    Strip<Element, false> strip(panel);
    strip.template load<Source, kLoad>(p.source);
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
      quantize_columns_of(transformed, by_rows);
    } else {
      quantize_columns_of(strip, by_rows);
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
  TE_DIST_DEVICE void quantize_columns_of(ColStrip& strip, const TensorScale& by_rows) const {
    Largest largest = find_amax(strip);
    const Tiles<ColStrip> tiles(*this, strip, p.col, col_tensor_scale(by_rows));
    Scale scales[kRuns];
    if constexpr (kCol == Share::kRun) {
      tiles.settle_runs(largest, scales);
    } else {
      Scale scale;
      if constexpr (kChoosesByRows) {
        scale = shared.squares[strip.local_row / kRun][strip.local_col / kRun];
      } else {
        scale = tiles.settle_square(largest);
      }
#pragma unroll
      for (int run = 0; run < kRuns; ++run) scales[run] = scale;
    }
    uint32_t codes[kRuns][2];
    encode<kStochastic>(strip, largest, scales, [&](int run, int first) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(shared.noise[strip.local_row + first]) + strip.local_col / 4;
      return doubled_bytes(gathered(words[0], words[2 * kPanel / 4], run % 2 ? 0x7531 : 0x6420), run / 2);
    }, codes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int pair = 0; pair < kRuns / 2; ++pair) {
      const uint32_t(&left)[2] = codes[2 * pair], (&right)[2] = codes[2 * pair + 1];
      shared.columns[position(warp, pair, lane)] = make_uint4(left[0], left[1], right[0], right[1]);
    }
    shared.col_scales[strip.local_row / kRun][strip.local_col / kRuns] = packed(scales);
  }

  // Calls `store` with every chunk that this thread writes of the columns' codes, 32 rows of one: number and column in the
  // panel. Neighbouring lanes take the four chunks of a column.
  template <class Store>
  TE_DIST_DEVICE void each_chunk(const Store& store) const {
    const int lane = threadIdx.x % 32, chunk = lane % 4, second = lane / 4 % 2, pair = lane / 16;
    const int owner = threadIdx.x / 32 * 2 + lane / 8 % 2;
    const uint2* halves = reinterpret_cast<const uint2*>(shared.columns) + position(2 * chunk, pair, owner) * 2 + second;
    constexpr int kOwners = kWarps * 2;  // at a time
#pragma unroll
    for (int i = 0; i < kPanel / kRuns / kOwners; ++i) {
      const uint2 upper = halves[i * kOwners * 2], lower = halves[(i * kOwners + 64) * 2];
      const uint32_t words[4] = {upper.x, upper.y, lower.x, lower.y};
      store(chunk, i * kOwners * kRuns, owner * kRuns + pair * 2 + second, words);
    }
  }

  TE_DIST_DEVICE void write_columns() const {
    const uint64_t stride = uint64_t(p.panels.col_rows(p.extents)) >> 1;
    const int64_t row = Panels::col_row(panel, panel.row);
    char* data = reinterpret_cast<char*>(p.col.data);
    if (panel.is_whole) {
      uint64_t of_panel = uint64_t(panel.col) * stride + (uint64_t(row) >> 1);
      asm("" : "+l"(of_panel));  // as in `Strip::byte_in`
      each_chunk([&](int chunk, int first, int col, const uint32_t (&words)[4]) {
        const uint64_t byte = of_panel + stride * uint32_t(col) + uint32_t(chunk * 16);
        store_run<16, kColStore>(data + byte + stride * first, {0, 16}, words);
      });
    } else {
      each_chunk([&](int chunk, int first, int col, const uint32_t (&words)[4]) {
        const int64_t byte = row / 2 + chunk * 16;
        const Inside inside = Inside::of(byte, 16, stride).only_if(panel.cols.has(first + col));
        store_run<16, kColStore>(data + (panel.col + first + col) * int64_t(stride) + byte, inside, words);
      });
    }
  }

  // Writes the kTiles scale bytes of each row, or column, of the panel: a warp the rows, another one the columns.
  TE_DIST_DEVICE void write_scales() const {
    if constexpr (kHasRow) {
      if (threadIdx.x / 32 == 0) write_row_scales();
    }
    if constexpr (kHasCol) {
      if (threadIdx.x / 32 == 1) write_col_scales();
    }
  }

  TE_DIST_DEVICE void write_row_scales() const {
    const int64_t first = (panel.col + panel.phase.col) / kRun;
    const Inside inside = Inside::of(first, kTiles, (panel.phase.col + p.extents.cols + kRun - 1) / kRun);
    const Plane<uint8_t>& scale = p.row.scale;
    write_lines<kRowScaleStore>(shared.row_scales, &scale.at(panel.row, first), scale.row_stride, scale.col_stride, inside,
                                panel.rows);
  }

  TE_DIST_DEVICE void write_col_scales() const {
    const int64_t first = (panel.row + panel.phase.row) / kRun;
    const Inside inside = Inside::of(first, kTiles, (p.panels.tiled_rows(panel) + kRun - 1) / kRun);
    const Plane<uint8_t>& scale = p.col.scale;
    write_lines<kColScaleStore>(shared.col_scales, &scale.at(first, panel.col), scale.col_stride, scale.row_stride, inside,
                                panel.cols);
  }

  // Each lane writes four lines: `pitch` apart, bytes of a line `stride`.
  template <int kWidth>
  TE_DIST_INLINE void write_lines(const uint32_t (&scales)[kTiles][kScaleWords], uint8_t* target, int64_t pitch,
                                  int64_t stride, const Inside& inside, const Inside& lines) {
    const int lane = threadIdx.x % 32;
    uint32_t bytes[kTiles / 4][kRuns];
#pragma unroll
    for (int half = 0; half < kTiles / 4; ++half) {
      uint32_t words[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) words[t] = scales[4 * half + t][lane];
      turn_bytes(words, bytes[half]);
    }
    target += lane * kRuns * pitch;
#pragma unroll
    for (int i = 0; i < kRuns; ++i, target += pitch) {
      if (!lines.has(lane * kRuns + i)) continue;
      const uint32_t words[2] = {bytes[0][i], bytes[1][i]};
      if constexpr (kWidth > 0) {
        store_run<kTiles, kWidth>(reinterpret_cast<char*>(target), inside, words);
      } else {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          if (inside.has(t)) target[t * stride] = uint8_t(words[t / 4] >> (8 * (t % 4)));
        }
      }
    }
  }

  TE_DIST_INLINE void run(const Params& p, int64_t index) {
    if (is_set(p.noop)) return;
    __shared__ Shared shared;
    const QuantizeNvFp4 self{p, Panel::of(p.extents, p.panels, p.grid, uint32_t(index)), shared};
    if (Panels::kIsGrouped && self.panel.rows.is_empty()) return;  // there are blocks for as many as groups may have
    TensorScale by_rows{};
    if constexpr (kHasRow || kStochastic || kChoosesByRows) by_rows = self.quantize_rows();
    if constexpr (kHasCol && (kStochastic || kChoosesByRows)) __syncwarp();  // both directions of 16 rows are one warp's
    if constexpr (kHasCol || Source::kHasSums || Source::kHasRowSums) self.quantize_columns(by_rows);
    __syncthreads();
    self.write_scales();
    if constexpr (Source::kHasSums) self.write_sums();
    if constexpr (kHasCol) self.write_columns();
  }

  TE_DIST_INLINE void run(const Params& p) { run(p, blockIdx.x); }
};

}  // namespace te_dist::cuda
