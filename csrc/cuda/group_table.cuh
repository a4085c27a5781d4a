// Where the groups of a matrix's rows begin, and how many tiles of each height lie before them: see GroupTable.
#pragma once

#include "common/types.cuh"

namespace te_dist::cuda {

// One block of threads walks over the groups, as many at a time as it has threads. kHeights: rows of a tile.
template <class Offset, int... kHeights>
struct FindGroups {
  static constexpr int kThreads = 512, kBlocks = 1, kWarps = kThreads / 32, kRows = 1 + sizeof...(kHeights);

  struct Params {
    const Offset* ends;  // of each group
    int64_t groups;
    int64_t rows;  // of the matrix
    int32_t* table;  // (1 + heights, groups + 1)
  };

  struct Shared {
    int32_t of_warps[kWarps];
  };

  // Sum over the threads before this one; `total` of all.
  TE_DIST_INLINE int32_t sum_before(int32_t value, Shared& shared, int32_t& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int32_t sum = value;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, distance);
      if (lane >= distance) sum += other;
    }
    __syncthreads();
    if (lane == 31) shared.of_warps[warp] = sum;
    __syncthreads();
    int32_t before = 0;
    total = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += shared.of_warps[w];
      total += shared.of_warps[w];
    }
    return before + sum - value;
  }

  // An end is never read as one before the last, nor as one behind the matrix.
  TE_DIST_INLINE int64_t clamped(int64_t end, int64_t rows) { return end < 0 ? 0 : end < rows ? end : rows; }

  TE_DIST_INLINE void run(const Params& p) {
    __shared__ Shared shared;
    constexpr int heights[] = {kHeights...};
    int32_t before[kRows - 1] = {};
    const int64_t pitch = p.groups + 1;
    for (int64_t first = 0; first < pitch; first += kThreads) {
      const int64_t group = first + threadIdx.x;
      const int64_t begin = group > 0 && group <= p.groups ? clamped(p.ends[group - 1], p.rows) : 0;
      const int64_t end = group < p.groups ? clamped(p.ends[group], p.rows) : begin;
      const int64_t size = end > begin ? end - begin : 0;
      if (group < pitch) p.table[group] = int32_t(begin);
#pragma unroll
      for (int h = 0; h < kRows - 1; ++h) {
        int32_t total;
        const int32_t tiles = before[h] + sum_before(int32_t((size + heights[h] - 1) / heights[h]), shared, total);
        if (group < pitch) p.table[(h + 1) * pitch + group] = tiles;
        before[h] += total;
      }
    }
  }
};

}  // namespace te_dist::cuda
