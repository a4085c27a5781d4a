// A source as a matrix in memory, in its element type; or what else it finds on the way alone.
#pragma once

#include "common/source.cuh"

namespace te_dist::cuda {

// kLoad, kStore: bytes that can be read and written at a time; kStore 0: nothing is written.
template <class Source, int kLoad, int kStore>
struct Evaluate {
  using Element = typename Source::Element;
  static constexpr int kThreads = kPanelThreads;
  static constexpr int kBlocks = Element::kPerWord == 2 && kLoad >= 8 && !Source::kIsComputed ? 3 : 2;

  struct Params {
    typename Source::Params source;
    Extents extents;
    void* out;
  };

  TE_DIST_INLINE void run(const Params& p) {
    const Place place = Place::of(p.extents, {0, 0}, blockIdx.x);
    Patch<Element> patch;
    load_patch<Source, kLoad>(p.source, place, patch);
    if constexpr (kStore > 0) {
      const Inside cols = place.cols.scaled(Element::kBytes);
      const int64_t stride = p.extents.cols * Element::kBytes;
      char* first = static_cast<char*>(p.out) + place.row * stride + place.col * Element::kBytes;
#pragma unroll
      for (int i = 0; i < kPatch; ++i, first += stride) {
        store_run<kPatch * Element::kBytes, kStore>(first, cols.only_if(place.rows.has(i)), patch.words[i]);
      }
    }
  }
};

}  // namespace te_dist::cuda
