// Randomized Hadamard transform of groups of 16 rows.
#include "elements.h"
#include "kernels_of_level.h"
#include "parallel.h"

namespace te_dist::cpu::TE_DIST_ISA {
namespace {

constexpr int kGroup = 16, kColumns = 64;

// Rows are summed and subtracted in fp32 at distance 1, then 2, 4, 8, and the result is divided by 4 (exactly) and rounded
// to bf16. This order is part of the definition: the CUDA kernel and the oracle follow it.
void transform(float (&values)[kGroup][kColumns]) {
  for (int distance = 1; distance < kGroup; distance *= 2) {
    for (int first = 0; first < kGroup; ++first) {
      if (first & distance) continue;
      float* a = values[first];
      float* b = values[first + distance];
      for (int c = 0; c < kColumns; ++c) {
        const float sum = a[c] + b[c], difference = a[c] - b[c];
        a[c] = sum;
        b[c] = difference;
      }
    }
  }
}

void transform_block(const Hadamard& op, int64_t row, int64_t col) {
  const int cols = int(op.x.cols - col < kColumns ? op.x.cols - col : kColumns);
  const uint16_t* source = static_cast<const uint16_t*>(op.x.data) + row * op.x.cols + col;
  alignas(64) float values[kGroup][kColumns] = {};
  for (int r = 0; r < kGroup; ++r) {
    const uint16_t flip = uint16_t((op.sign_mask >> r & 1u) << 15);
    for (int c = 0; c < cols; ++c) values[r][c] = decode_bfloat16(source[r * op.x.cols + c] ^ flip);
  }
  transform(values);
  for (int r = 0; r < kGroup; ++r) {
    uint16_t* out = op.out + (row + r) * op.x.cols + col;
    for (int c = 0; c < cols; ++c) out[c] = encode_bfloat16(values[r][c] * 0.25f);
  }
}

}  // namespace

void hadamard(const Hadamard& op, int threads) {
  parallel_for(op.x.rows / kGroup, threads, [&](int64_t group) {
    for (int64_t col = 0; col < op.x.cols; col += kColumns) transform_block(op, group * kGroup, col);
  });
}

}  // namespace te_dist::cpu::TE_DIST_ISA
