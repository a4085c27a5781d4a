// Reciprocal of the root mean square of every row: 1 / sqrt(mean of squares + eps).
#pragma once

#include "common/source.cuh"

namespace te_dist::cuda {

// kLoad: bytes that can be read at a time. A warp takes a row, 256 columns at a time, eight to a lane.
template <class Source, int kLoad>
struct RmsRstd {
  using Element = typename Source::Element;
  static constexpr int kThreads = 256;
  static constexpr int kBlocks = 4;
  static constexpr int kRows = kThreads / 32;    // of a block
  static constexpr int kWidth = 32 * kPatch;     // columns that a warp reads at a time
  static constexpr int kUnroll = kLoad >= 8 ? 4 : 1;

  struct Params {
    typename Source::Params source;
    Extents extents;
    float eps;
    float* out;
  };

  // Column c is added to sum number c % 256, from left to right; the sums are folded at distances 4, 2, 1, and then
  // 8, 16, 32, 64, 128. This order is part of the definition.
  TE_DIST_INLINE void run(const Params& p) {
    const int64_t row = int64_t(blockIdx.x) * kRows + threadIdx.x / 32;
    if (row >= p.extents.rows) return;
    float sums[kPatch] = {};
    for (int64_t col = threadIdx.x % 32 * kPatch; col < p.extents.cols; col += kUnroll * kWidth) {
      Octet<Element> words[kUnroll][1];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const Inside cols = Inside::of(col + u * kWidth, kPatch, p.extents.cols);
        typename Source::template Reader<kLoad>(p.source, p.extents, row, col + u * kWidth, cols).read({0, 1}, words[u]);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int j = 0; j < kPatch; ++j) {
          const float value = Element::value(words[u][0][j / Element::kPerWord], j % Element::kPerWord);
          sums[j] += value * value;
        }
      }
    }
    write(p, row, sums);
  }

 private:
  TE_DIST_INLINE void write(const Params& p, int64_t row, float (&sums)[kPatch]) {
#pragma unroll
    for (int half = kPatch / 2; half > 0; half /= 2) {
#pragma unroll
      for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) sums[0] += __shfl_xor_sync(kFullWarp, sums[0], mask);
    if (threadIdx.x % 32 == 0) p.out[row] = rms_rstd(sums[0], float(p.extents.cols), p.eps);
  }
};

}  // namespace te_dist::cuda
