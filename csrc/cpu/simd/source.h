// Rows of a kernel's matrix, copied or computed.
#pragma once

#include <cstring>

#include "elements.h"

namespace te_dist::cpu::TE_DIST_ISA {

// `count` elements of a row that has to be computed or found, from column `col` on.
template <class Element>
void compute_row(const Source& x, int64_t row, int64_t col, int64_t count, typename Element::Storage* out);

// The same of any row.
template <class Element>
TE_DIST_INLINE void read_row(const Source& x, int64_t row, int64_t col, int64_t count,
                             typename Element::Storage* out) {
  using Storage = typename Element::Storage;
  if (!x.is_plain()) return compute_row<Element>(x, row, col, count, out);
  std::memcpy(out, static_cast<const Storage*>(x.data) + row * x.cols + col, sizeof(Storage) * size_t(count));
}

}  // namespace te_dist::cpu::TE_DIST_ISA
