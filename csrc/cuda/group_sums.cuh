// Sums of the columns of groups, from those of their panels.
#pragma once

#include "common/types.cuh"

namespace te_dist::cuda {

// One thread for a column of a group. As in panels, eight values are added after each other, two of those sums, and eight of
// these, to +0; and so are the sums of 128 panels, of 128 of those, and so on. What is not there counts as +0.
struct GroupSums {
  static constexpr int kThreads = 256, kBlocks = 4;
  static constexpr int kRows = 8, kPairs = 8;
  static constexpr int kLevels = 4;  // enough for 2^31 rows

  struct Params {
    const float* sums;  // (panels, cols)
    int64_t panels;
    int64_t cols;
    const int32_t* tiles;  // before each group
    int64_t groups;
    float* out;  // (groups, cols)
  };

  float rows[kLevels] = {}, before[kLevels] = {}, total[kLevels] = {};

  // Takes number `index` of the sums of eight.
  template <int kLevel = 0>
  TE_DIST_DEVICE void add(float eight, uint32_t index, bool is_last) {
    const bool is_second = index & 1;
    if (is_second || is_last) total[kLevel] += is_second ? before[kLevel] + eight : eight;
    before[kLevel] = eight;
    if constexpr (kLevel + 1 < kLevels) {
      if (index % (2 * kPairs) != 2 * kPairs - 1 && !is_last) return;
      rows[kLevel + 1] += total[kLevel];
      total[kLevel] = 0.0f;
      index /= 2 * kPairs;
      if (index % kRows != kRows - 1 && !is_last) return;
      add<kLevel + 1>(rows[kLevel + 1], index / kRows, is_last);
      rows[kLevel + 1] = 0.0f;
    }
  }

  TE_DIST_INLINE float sum(const float* next, int64_t pitch, int64_t count) {
    GroupSums self;
#pragma unroll 1
    for (int64_t index = 0; index < count; index += kRows) {
      float eight = 0.0f;
#pragma unroll
      for (int i = 0; i < kRows; ++i, next += pitch) eight += index + i < count ? __ldg(next) : 0.0f;
      self.add(eight, uint32_t(index / kRows), index + kRows >= count);
    }
    return self.total[kLevels - 1];
  }

  TE_DIST_INLINE void run(const Params& p) {
    const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (index >= p.groups * p.cols) return;
    const int64_t group = index / p.cols, col = index - group * p.cols;
    const int64_t first = __ldg(p.tiles + group), end = __ldg(p.tiles + group + 1);
    p.out[index] = sum(p.sums + first * p.cols + col, p.cols, (end < p.panels ? end : p.panels) - first);
  }
};

}  // namespace te_dist::cuda
