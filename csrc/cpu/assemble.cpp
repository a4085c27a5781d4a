#include "assemble.h"

#include <cstring>

namespace te_dist::cpu {

void copy_parts(const Assemble& op, int threads) {
  for (const Rectangle& part : op.parts) {
    char* out = op.out + part.row * op.out_stride + part.col_bytes;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < part.rows; ++row) {
      std::memcpy(out + row * op.out_stride, part.data + row * part.row_stride, size_t(part.row_bytes));
    }
  }
}

}  // namespace te_dist::cpu
