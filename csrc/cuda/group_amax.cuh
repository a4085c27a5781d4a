// Largest magnitude of every group of rows, or of all of them. The kernel in front sets them to zero.
#pragma once

#include "common/overlap.cuh"
#include "common/panels.cuh"
#include "common/source.cuh"

namespace te_dist::cuda {

// kLoad: bytes that can be read at a time. A block of threads takes kAcross panels of a tile of rows.
template <class Source, int kLoad>
struct GroupAmax {
  using Element = typename Source::Element;
  static constexpr int kThreads = kPanelThreads, kAcross = 4;
  static constexpr int kBlocks = Element::kPerWord == 2 && kLoad >= 8 ? (Source::kIsComputed ? 3 : 4) : 2;

  struct Params {
    typename Source::Params source;
    Extents extents;
    GroupedRows panels;
    float* out;
    int32_t is_each;  // whether there is one for each group
  };

  TE_DIST_INLINE void run(const Params& p) {
    __shared__ float of_warps[kWarps];
    const int across = int(panels_along(p.extents.cols)), blocks = (across + kAcross - 1) / kAcross;
    const int tile = int(blockIdx.x) / blocks, first = (int(blockIdx.x) - tile * blocks) * kAcross;
    const View view = p.panels.view_of_tile(p.extents, tile);
    if (int64_t(tile) * kPanel - view.phase.row >= view.extents.rows) return wait_for_previous();
    uint32_t largest = 0;
#pragma unroll 1
    for (int col = first; col < min(first + kAcross, across); ++col) {
      Patch<Element> patch;
      const Place place = Place::of(view.extents, view.phase, int64_t(tile) * across + col);
      load_patch<Source, kLoad, true>(p.source, place, patch);
      largest = Element::raise(largest, patch.largest());
    }
    const float amax = largest_of_block(Element::largest(largest), of_warps);
    wait_for_previous();
    if (threadIdx.x == 0) raise_amax(p.out + (p.is_each ? view.group : 0), amax);
  }
};

}  // namespace te_dist::cuda
