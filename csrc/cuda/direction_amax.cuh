// Largest magnitude of a matrix, or of groups of its rows, for one direction, of its Hadamard transform for
// the other. The kernels in front set both to zero.
#pragma once

#include "common/overlap.cuh"
#include "common/runs.cuh"

namespace te_dist::cuda {

// kTransforms: `col_amax` is that of the transform. kLoad: bytes that can be read at a time.
template <class Source, bool kTransforms, int kLoad, class Panels>
struct DirectionAmax {
  using Element = typename Source::Element;
  static constexpr int kThreads = kPanelThreads;
  static constexpr int kBlocks = kTransforms || Element::kPerWord == 1 || kLoad < 8 ? 2 : 4;

  struct Params {
    typename Source::Params source;
    Extents extents;
    Panels panels;
    PanelGrid grid;
    uint32_t sign_mask;
    float* row_amax;  // null: not wanted
    float* col_amax;
    int32_t is_each;  // whether there is one for each group
  };

  TE_DIST_INLINE void raise(float* amax, int place, float magnitude) {
    const float largest = float_of(__reduce_max_sync(kFullWarp, bits_of(magnitude)));
    if (threadIdx.x % 32 == 0 && amax) raise_amax(amax + place, largest);
  }

  TE_DIST_INLINE void run(const Params& p) {
    const Panel panel = Panel::of(p.extents, p.panels, p.grid, blockIdx.x);
    if (Panels::kIsGrouped && panel.rows.is_empty()) return wait_for_previous();
    Strip<Element, false> strip(panel);
    strip.template load<Source, kLoad>(p.source);
    if constexpr (Panels::kIsGrouped && Source::kIsComputed) strip.keep_rows();
    float amax[kRuns], largest = 0.0f;
    strip.amax(amax);
#pragma unroll
    for (int run = 0; run < kRuns; ++run) largest = fmaxf(largest, amax[run]);
    float of_columns = largest;
    if constexpr (kTransforms) {
      of_columns = 0.0f;
      transform_words(in_bfloat16(strip).words, p.sign_mask, [&](int, float (&values)[kMixedRows][2]) {
#pragma unroll
        for (int i = 0; i < kMixedRows; ++i) {
          of_columns = fmaxf(fmaxf(of_columns, fabsf(values[i][0])), fabsf(values[i][1]));
        }
      });
      // Rounding keeps the order: the largest of rounded values is the largest, rounded.
      of_columns = BFloat16::value(BFloat16::store_pair(of_columns * 0.25f, 0.0f), 0);
    }
    wait_for_previous();
    const int place = Panels::kIsGrouped && p.is_each ? panel.group : 0;
    raise(p.row_amax, place, largest);
    raise(p.col_amax, place, of_columns);
  }
};

}  // namespace te_dist::cuda
