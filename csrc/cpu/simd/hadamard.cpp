// Randomized Hadamard transform of groups of 16 rows.
#include <cstring>

#include "elements.h"
#include "kernels_of_level.h"
#include "parallel.h"

namespace te_dist::cpu::TE_DIST_ISA {
namespace {

constexpr int kGroup = 16;

// Rows are summed and subtracted in fp32 at distance 1, then 2, 4, 8, and the result is divided by 4 (exactly) and
// rounded to bf16. This order is part of the definition: the CUDA kernel and the oracle follow it.
TE_DIST_INLINE void transform(F32 (&rows)[kGroup]) {
  for (int distance = 1; distance < kGroup; distance *= 2) {
    for (int first = 0; first < kGroup; ++first) {
      if (first & distance) continue;
      const F32 a = rows[first], b = rows[first + distance];
      rows[first] = a + b;
      rows[first + distance] = a - b;
    }
  }
}

// kLanes columns of a group.
void transform_columns(const uint16_t* source, int64_t stride, uint32_t sign_mask, uint16_t* out) {
  F32 rows[kGroup];
  for (int r = 0; r < kGroup; ++r) {
    const U32 flip = all<U32>((sign_mask >> r & 1u) << 31);
    rows[r] = float_of(bits_of(BFloat16::load_lanes(source + r * stride)) ^ flip);
  }
  transform(rows);
  for (int r = 0; r < kGroup; ++r) BFloat16::store_lanes(out + r * stride, rows[r] * 0.25f);
}

void transform_group(const Hadamard& op, int64_t row) {
  const int64_t cols = op.x.cols, whole = cols / kLanes * kLanes;
  const uint16_t* source = static_cast<const uint16_t*>(op.x.data) + row * cols;
  uint16_t* out = op.out + row * cols;
  for (int64_t c = 0; c < whole; c += kLanes) transform_columns(source + c, cols, op.sign_mask, out + c);
  if (whole == cols) return;
  uint16_t padded[kGroup][kLanes] = {}, result[kGroup][kLanes];
  const size_t bytes = sizeof(uint16_t) * size_t(cols - whole);
  for (int r = 0; r < kGroup; ++r) std::memcpy(padded[r], source + r * cols + whole, bytes);
  transform_columns(padded[0], kLanes, op.sign_mask, result[0]);
  for (int r = 0; r < kGroup; ++r) std::memcpy(out + r * cols + whole, result[r], bytes);
}

}  // namespace

void hadamard(const Hadamard& op, int threads) {
  parallel_for(op.x.rows / kGroup, threads, [&](int64_t group) { transform_group(op, group * kGroup); });
}

}  // namespace te_dist::cpu::TE_DIST_ISA
