// Largest magnitude of a matrix: of each block's share of it, or raised to in one place.
#pragma once

#include "common/overlap.cuh"
#include "common/source.cuh"

namespace te_dist::cuda {

// kLoad: bytes that can be read at a time. kParts: every block writes a magnitude of its own, which the next kernel may
// wait for; otherwise all raise one, which the kernel in front sets to zero.
template <class Source, int kLoad, bool kParts>
struct TensorAmax {
  using Element = typename Source::Element;
  static constexpr int kThreads = kPanelThreads;
  static constexpr int kBlocks = Element::kPerWord == 2 && kLoad >= 8 ? (Source::kIsComputed ? 3 : 4) : 2;

  struct Params {
    typename Source::Params source;
    Extents extents;
    const uint32_t* noop;
    float* out;  // kParts: one for every block
  };

  TE_DIST_INLINE uint32_t largest_of_panels(const Params& p) {
    const int64_t panels = panels_along(p.extents.rows) * panels_along(p.extents.cols);
    uint32_t largest = 0;
    for (int64_t panel = blockIdx.x; panel < panels; panel += gridDim.x) {
      Patch<Element> patch;
      load_patch<Source, kLoad>(p.source, Place::of(p.extents, {0, 0}, panel), patch);
      largest = Element::raise(largest, patch.largest());
    }
    return largest;
  }

  TE_DIST_INLINE void run(const Params& p) {
    __shared__ float of_warps[kWarps];
    if (is_set(p.noop)) return;
    if constexpr (kParts) let_next_begin();
    const float amax = largest_of_block(Element::largest(largest_of_panels(p)), of_warps);
    if (threadIdx.x != 0) return;
    if constexpr (kParts) {
      p.out[blockIdx.x] = amax;
    } else {
      wait_for_previous();
      raise_amax(p.out, amax);
    }
  }
};

}  // namespace te_dist::cuda
