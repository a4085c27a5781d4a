// Where a kernel's matrix comes from.
//
// A source is a type with an Element, with Params, and with a Reader<kWidth> that goes down the rows of eight columns.
// kWidth: bytes that every address is a multiple of.
#pragma once

#include "patch.cuh"

namespace te_dist::cuda {

// Eight elements of a row.
template <class Element>
using Octet = uint32_t[kPatch / Element::kPerWord];

// Elements as they lie in memory, (rows, cols).
template <class Element_>
struct Plain {
  using Element = Element_;

  struct Params {
    const void* x;
  };

  template <int kWidth>
  struct Reader {
    const char* next;
    int64_t stride;
    Inside cols;  // in bytes

    TE_DIST_DEVICE Reader(const Params& p, const Extents& extents, int64_t row, int64_t col, const Inside& inside)
        : next(static_cast<const char*>(p.x) + (row * extents.cols + col) * Element::kBytes),
          stride(extents.cols * Element::kBytes),
          cols(inside.scaled(Element::kBytes)) {}

    // The row's elements, zeros where the matrix has none, and down to the next row.
    TE_DIST_DEVICE void read(bool is_inside, Octet<Element>& words) {
      load_run<kPatch * Element::kBytes, kWidth>(next, cols.only_if(is_inside), words);
      next += stride;
    }
  };
};

// Reads a patch. What lies outside of the matrix is zero.
template <class Source, int kWidth>
TE_DIST_INLINE void load_patch(const typename Source::Params& p, const Place& place,
                               Patch<typename Source::Element>& patch) {
  typename Source::template Reader<kWidth> reader(p, place.extents, place.row, place.col, place.cols);
#pragma unroll
  for (int i = 0; i < kPatch; ++i) reader.read(place.rows.has(i), patch.words[i]);
}

}  // namespace te_dist::cuda
