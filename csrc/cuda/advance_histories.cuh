// Delayed scaling: histories of largest magnitudes one step on, and the scales that follow, of many modules at once.
#pragma once

#include "common/types.cuh"

namespace te_dist::cuda {

// What one module keeps, a column for each scale.
struct History {
  float* history;           // (length, cols); row 0 is the running step, the oldest of those before it is row 1
  float* running;           // (cols,), largest magnitudes of the running step
  float* scale;             // (cols,)
  const float* scaled_max;  // (cols,), what the largest magnitude is scaled to
  int64_t cols;
  int64_t end;  // blocks of threads of this module and of those before it
};

// A block of threads takes up to kCols columns of a module, and in each round as many rows as its threads hold: those are read,
// and when all are, written one row higher up, where the round before has read.
// kOfAll: whether a scale follows from the largest of all rows, or from the running step alone. kModules: of a launch.
template <bool kOfAll, int kModules, int kCols>
struct AdvanceHistories {
  static constexpr int kThreads = 512, kBlocks = 2;
  static constexpr int kRows = 4;  // that a thread holds

  struct Params {
    int64_t length;
    History each[kModules];
  };

  // What is infinite, or no number, counts as nothing.
  TE_DIST_INLINE float finite(float amax) { return amax < float_of(kInfinityBits) ? amax : 0.0f; }

  TE_DIST_INLINE void run(const Params& p) {
    __shared__ int largest[kCols];  // not negative: ordered as integers are
    int index = 0;
    while (blockIdx.x >= p.each[index].end) ++index;
    const History& own = p.each[index];
    const int64_t first = (blockIdx.x - (index ? p.each[index - 1].end : 0)) * kCols;
    const int cols = int(min(own.cols - first, int64_t(kCols)));
    const int lanes = kThreads / cols, lane = threadIdx.x / cols, col = threadIdx.x % cols;
    float* const column = own.history + first + col;
    const float latest = own.running[first + col];
    const bool moves = latest != 0.0f;  // not where nothing was seen
    if (threadIdx.x < kCols) largest[threadIdx.x] = 0;
    __syncthreads();

    float amax = finite(latest);
    for (int64_t begin = 1; begin < p.length; begin += lanes * kRows) {
      float values[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int64_t row = begin + i * lanes + lane;
        values[i] = lane < lanes && row < p.length ? column[row * own.cols] : 0.0f;
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int64_t row = begin + i * lanes + lane;
        const bool is_kept = lane < lanes && row > 1 && row < p.length;
        if (moves && is_kept) column[(row - 1) * own.cols] = values[i];
        if (kOfAll) amax = fmaxf(amax, finite(values[i]));
      }
    }
    if (kOfAll && lane < lanes) atomicMax(largest + col, int(__float_as_uint(amax)));
    __syncthreads();

    if (lane) return;
    const float found = kOfAll ? __uint_as_float(uint32_t(largest[col])) : latest;
    if (moves && found > 0.0f && found < float_of(kInfinityBits)) {
      own.scale[first + col] = fminf(own.scaled_max[first + col] / found, float_of(kInfinityBits - 1));
    }
    if (moves && p.length > 1) column[(p.length - 1) * own.cols] = latest;
    column[0] = 0.0f;
    own.running[first + col] = 0.0f;
  }
};

}  // namespace te_dist::cuda
