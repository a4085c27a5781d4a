// Copies of rows sorted by the expert they go to, those for one expert in their order: a counting sort in three kernels,
// in which each warp counts, and then places, a chunk of copies that follow one another.
#pragma once

#include "../numerics/routing.h"
#include "common/types.cuh"

namespace te_dist::cuda {

constexpr int kChunk = 256;  // copies of a warp

// Experts have numbers from `first` on; copies with any other are nobody's, and come last, as if for one expert more.
struct Copies {
  const int64_t* experts;  // (copies,)
  int64_t copies;
  int64_t first;
  int64_t num_experts;
  int64_t chunks;
  int32_t* before;      // (num_experts + 1, chunks): copies for an expert in a chunk, then in all chunks before it
  int64_t copies_each;  // of a row
  int64_t elsewhere;    // the position of nobody's copies; below 0: where they come
  int64_t* index;       // (copies,): the row of each sorted copy
  int64_t* choices;     // (copies,): which copy it is
  int64_t* positions;   // (copies,): where a copy is once sorted
  int64_t* counts;      // (num_experts,)

  // Of a copy; of one behind the last, none that there is.
  TE_DIST_DEVICE int32_t expert_of(int64_t copy) const {
    if (copy >= copies) return -1;
    const int64_t expert = __ldg(experts + copy);
    return int32_t(expert < first || expert - first > num_experts ? num_experts : expert - first);
  }
};

// Of what the lanes up to this one have.
TE_DIST_INLINE int32_t sum_up_to(int32_t value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int32_t other = __shfl_up_sync(0xFFFFFFFFu, value, distance);
    if (int(threadIdx.x % 32) >= distance) value += other;
  }
  return value;
}

// All warps of a block together count in shared memory for the most experts that there are.
template <int kWarps>
struct CountCopies {
  using Params = Copies;
  static constexpr int kThreads = kWarps * 32, kBlocks = 1, kMost = kMostExperts / kWarps;

  TE_DIST_INLINE void run(const Params& p) {
    __shared__ int32_t of_warps[kWarps][kMost + 1];
    const int lane = threadIdx.x % 32;
    int32_t* counts = of_warps[threadIdx.x / 32];
    const int64_t chunk = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (chunk >= p.chunks) return;
    for (int e = lane; e <= p.num_experts; e += 32) counts[e] = 0;
    __syncwarp();
    for (int i = lane; i < kChunk; i += 32) {
      const int32_t expert = p.expert_of(chunk * kChunk + i);
      if (expert >= 0) atomicAdd(counts + expert, 1);
    }
    __syncwarp();
    for (int e = lane; e <= p.num_experts; e += 32) p.before[e * p.chunks + chunk] = counts[e];
  }
};

// A warp for an expert.
struct CountBefore {
  using Params = Copies;
  static constexpr int kThreads = 128, kBlocks = 1, kWarps = kThreads / 32;

  TE_DIST_INLINE void run(const Params& p) {
    const int64_t expert = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (expert > p.num_experts) return;
    int32_t* before = p.before + expert * p.chunks;
    int32_t total = 0;
    for (int64_t first = 0; first < p.chunks; first += 32) {
      const int64_t chunk = first + threadIdx.x % 32;
      const int32_t count = chunk < p.chunks ? before[chunk] : 0, sum = sum_up_to(count);
      if (chunk < p.chunks) before[chunk] = total + sum - count;
      total += __shfl_sync(0xFFFFFFFFu, sum, 31);
    }
    if (threadIdx.x % 32 == 0 && expert < p.num_experts) p.counts[expert] = total;
  }
};

template <int kWarps>
struct PlaceCopies {
  using Params = Copies;
  static constexpr int kThreads = kWarps * 32, kBlocks = 1, kMost = kMostExperts / kWarps;

  // Where the next copy of the chunk for each expert goes.
  TE_DIST_INLINE void begin(const Params& p, int64_t chunk, int32_t* next) {
    int32_t first = 0;
    for (int at = 0; at <= p.num_experts; at += 32) {
      const int expert = at + int(threadIdx.x % 32);
      const int32_t count = expert < p.num_experts ? int32_t(p.counts[expert]) : 0, sum = sum_up_to(count);
      if (expert <= p.num_experts) next[expert] = first + sum - count + p.before[expert * p.chunks + chunk];
      first += __shfl_sync(0xFFFFFFFFu, sum, 31);
    }
    __syncwarp();
  }

  TE_DIST_INLINE void run(const Params& p) {
    __shared__ int32_t of_warps[kWarps][kMost + 1];
    int32_t* next = of_warps[threadIdx.x / 32];
    const int64_t chunk = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (chunk >= p.chunks) return;
    begin(p, chunk, next);
    for (int i = threadIdx.x % 32; i < kChunk; i += 32) {
      const int64_t copy = chunk * kChunk + i;
      const int32_t expert = p.expert_of(copy);
      const uint32_t same = __match_any_sync(0xFFFFFFFFu, expert);
      const int rank = __popc(same & ((1u << (threadIdx.x % 32)) - 1));  // of the lanes with that expert
      const int32_t position = expert >= 0 ? next[expert] + rank : 0;
      __syncwarp();
      if (expert >= 0 && rank == 0) next[expert] += __popc(same);
      __syncwarp();
      if (expert < 0) continue;
      p.positions[copy] = expert == p.num_experts && p.elsewhere >= 0 ? p.elsewhere : position;
      p.choices[position] = copy;
      p.index[position] = copy / p.copies_each;
    }
  }
};

}  // namespace te_dist::cuda
