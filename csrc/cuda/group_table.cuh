// Where the groups of a matrix's rows begin, and how many tiles of each height lie before them: see GroupTable.
#pragma once

#include "common/types.cuh"

namespace te_dist::cuda {

// One block of threads walks over the groups, as many at a time as it has threads. kAreSizes: whether sizes of groups are
// given, else their ends. kHeights: rows of a tile.
template <class Offset, bool kAreSizes, int... kHeights>
struct FindGroups {
  static constexpr int kThreads = 512, kBlocks = 1, kWarps = kThreads / 32, kRows = 1 + sizeof...(kHeights);

  struct Params {
    const Offset* given;  // of each group; null where there is one alone, which has all rows
    int64_t groups;
    int64_t rows;  // of the matrix
    int32_t* table;  // (1 + heights, groups + 1)
  };

  struct Shared {
    int64_t of_warps[kWarps];
  };

  // The sum of two values, or the larger.
  template <bool kAdds, class T>
  TE_DIST_INLINE T join(T a, T b) {
    return kAdds ? a + b : a < b ? b : a;
  }

  // Of what the threads before this one have, none of which is negative; `total` of all.
  template <bool kAdds, class T>
  TE_DIST_INLINE T joined_before(T value, Shared& shared, T& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T joined = value;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const T other = __shfl_up_sync(0xFFFFFFFFu, joined, distance);
      if (lane >= distance) joined = join<kAdds>(joined, other);
    }
    const T in_warp = __shfl_up_sync(0xFFFFFFFFu, joined, 1);
    __syncthreads();
    if (lane == 31) shared.of_warps[warp] = joined;
    __syncthreads();
    T before = lane > 0 ? in_warp : T(0);
    total = 0;
    for (int w = 0; w < kWarps; ++w) {
      const T its = T(shared.of_warps[w]);
      if (w < warp) before = join<kAdds>(before, its);
      total = join<kAdds>(total, its);
    }
    return before;
  }

  TE_DIST_INLINE int64_t clamped(int64_t end, int64_t rows) { return end < 0 ? 0 : end < rows ? end : rows; }

  // First row of a group and the one behind its last; `before`: end of the groups that were walked over already. An end is
  // never read as one before the last, nor as one behind the matrix.
  TE_DIST_INLINE void find(const Params& p, int64_t group, int64_t& before, Shared& shared, int64_t& begin, int64_t& end) {
    const int64_t all = p.rows, given = group < p.groups ? clamped(p.given ? p.given[group] : all, p.rows) : 0;
    int64_t total;
    const int64_t start = join<kAreSizes>(before, joined_before<kAreSizes>(given, shared, total));
    before = join<kAreSizes>(before, total);
    begin = clamped(start, p.rows), end = clamped(join<kAreSizes>(start, given), p.rows);
  }

  TE_DIST_INLINE void run(const Params& p) {
    __shared__ Shared shared;
    constexpr int heights[] = {kHeights...};
    int32_t before[kRows - 1] = {};
    int64_t rows_before = 0;
    const int64_t pitch = p.groups + 1;
    for (int64_t first = 0; first < pitch; first += kThreads) {
      const int64_t group = first + threadIdx.x;
      int64_t begin, end;
      find(p, group, rows_before, shared, begin, end);
      const int64_t size = end - begin;
      if (group < pitch) p.table[group] = int32_t(begin);
#pragma unroll
      for (int h = 0; h < kRows - 1; ++h) {
        int32_t total;
        const int32_t tiles = before[h] + joined_before<true>(int32_t((size + heights[h] - 1) / heights[h]), shared, total);
        if (group < pitch) p.table[(h + 1) * pitch + group] = tiles;
        before[h] += total;
      }
    }
  }
};

}  // namespace te_dist::cuda
