// What a router decides for each row of logits, and the gradient of these. Sums of a row: column c is added to sum number
// c % 32, that of its lane, from left to right; then these are folded at distances 16, 8, 4, 2 and 1.
#pragma once

#include "../numerics/routing.h"
#include "common/types.cuh"

namespace te_dist::cuda {

constexpr int kLanes = 32;

template <class Fold>
TE_DIST_INLINE float folded(float value, Fold fold) {
#pragma unroll
  for (int distance = kLanes / 2; distance; distance /= 2) {
    value = fold(value, __shfl_xor_sync(0xFFFFFFFFu, value, distance));
  }
  return value;
}

TE_DIST_INLINE float sum_of_lanes(float value) {
  return folded(value, [](float a, float b) { return a + b; });
}

TE_DIST_INLINE uint64_t largest_of_lanes(uint64_t value) {
  const uint32_t high = uint32_t(value >> 32), most = __reduce_max_sync(0xFFFFFFFFu, high);
  return uint64_t(most) << 32 | __reduce_max_sync(0xFFFFFFFFu, high == most ? uint32_t(value) : 0);
}

// The scores of a row, of which a lane has the columns lane, lane + 32, ... kHeld: so many of them lie in registers; 0:
// none, they are found again wherever they are asked for.
template <Score kScore, int kHeld>
struct RowScores {
  static constexpr int kPlaces = kHeld ? kHeld : 1;

  const float* logits;
  int cols, lane;
  float most, total;  // of a softmax: the largest logit, and the sum of powers of what the others are less
  float held[kPlaces];

  TE_DIST_DEVICE RowScores(const float* logits_, int64_t cols_) : logits(logits_), cols(int(cols_)), lane(threadIdx.x % kLanes) {
    if constexpr (kScore == Score::kSoftmax) {
      most = -float_of(kInfinityBits);
      each([&](int col, int i) {
        held[i] = __ldg(logits + col);
        most = larger(held[i], most);
      });
      most = folded(most, [](float a, float b) { return larger(a, b); });
      total = 0.0f;
      each([&](int col, int i) {
        held[i] = exp_of_negative((kHeld ? held[i] : __ldg(logits + col)) - most);
        total += held[i];
      });
      total = sum_of_lanes(total);
    }
    if constexpr (kHeld != 0) {
      each([&](int col, int i) { held[i] = kScore == Score::kSoftmax ? held[i] / total : of(col); });
    }
  }

  // body(column, which of those that are held it is) for each column of the lane.
  template <class Body>
  TE_DIST_DEVICE void each(Body body) const {
    if constexpr (kHeld != 0) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (lane + kLanes * i < cols) body(lane + kLanes * i, i);
      }
    } else {
      for (int col = lane; col < cols; col += kLanes) body(col, 0);
    }
  }

  // body(column, score) for each column of the lane.
  template <class Body>
  TE_DIST_DEVICE void each_score(Body body) const {
    each([&](int col, int i) { body(col, kHeld ? held[i] : of(col)); });
  }

  // Of any column.
  TE_DIST_DEVICE float of(int col) const {
    const float logit = __ldg(logits + col);
    if constexpr (kScore == Score::kSoftmax) return exp_of_negative(logit - most) / total;
    return sigmoid(logit);
  }

  // What is divided by to make scores add up to one.
  TE_DIST_DEVICE float divisor() const {
    float sum = 0.0f;
    each_score([&](int, float score) { sum += score; });
    return sum_of_lanes(sum) + kTiny;
  }
};

// A warp for a row.
template <Score kScore, int kHeld>
struct Route {
  using Scores = RowScores<kScore, kHeld>;
  static constexpr int kThreads = 256, kBlocks = 2, kRows = kThreads / kLanes;

  struct Params {
    const float* logits;  // (rows, cols)
    const float* bias;    // (cols,), is added for the choice; or null
    int64_t rows;
    int64_t cols;
    int64_t count;  // that are chosen
    int64_t num_groups;
    int64_t top_groups;  // of which columns are chosen
    int64_t normalizes;
    float factor;
    int64_t* experts;      // (rows, count)
    float* probabilities;  // (rows, count)
    float* scores;         // (rows, cols), adding up to one; or null
    float* counts;         // (cols,), zeros before; or null
  };

  // How columns are ranked for the choice.
  struct Ranks {
    const Params& p;
    const Scores& row;
    uint64_t held[Scores::kPlaces];

    TE_DIST_DEVICE Ranks(const Params& p_, const Scores& row_) : p(p_), row(row_) {
      if constexpr (kHeld != 0) row.each([&](int col, int i) { held[i] = rank_of(value(col, row.held[i]), uint32_t(col)); });
    }

    TE_DIST_DEVICE float value(int col, float score) const { return score + (p.bias ? __ldg(p.bias + col) : 0.0f); }

    // The largest below `last` of the columns that are allowed.
    template <class Allowed>
    TE_DIST_DEVICE uint64_t next(uint64_t last, Allowed is_allowed) const {
      uint64_t found = 0;
      row.each([&](int col, int i) {
        const uint64_t its = kHeld ? held[i] : rank_of(value(col, row.of(col)), uint32_t(col));
        if (is_allowed(col) && its < last && its > found) found = its;
      });
      return largest_of_lanes(found);
    }
  };

  // Marks the groups whose two best columns have the largest sums, the others by 0.
  TE_DIST_INLINE void choose_groups(const Params& p, const Ranks& ranks, uint64_t* groups) {
    const int num_groups = int(p.num_groups), size = int(p.cols) / num_groups, lane = ranks.row.lane;
    for (int group = 0; group < num_groups; ++group) {
      const auto is_inside = [&](int col) { return uint32_t(col - group * size) < uint32_t(size); };
      const uint64_t first = ranks.next(~uint64_t(0), is_inside);
      const float best = value_of_rank(first);
      const float sum = size > 1 ? best + value_of_rank(ranks.next(first, is_inside)) : best;
      if (lane == 0) groups[group] = rank_of(sum, uint32_t(group));
    }
    __syncwarp();
    uint64_t last = ~uint64_t(0);
    for (int64_t k = 0; k < p.top_groups; ++k) {
      uint64_t found = 0;
      for (int group = lane; group < num_groups; group += kLanes) {
        if (groups[group] < last && groups[group] > found) found = groups[group];
      }
      last = largest_of_lanes(found);
    }
    for (int group = lane; group < num_groups; group += kLanes) {
      if (groups[group] < last) groups[group] = 0;
    }
    __syncwarp();
  }

  TE_DIST_INLINE void run(const Params& p) {
    __shared__ uint64_t of_rows[kRows][kMostExpertGroups];
    const int64_t at = int64_t(blockIdx.x) * kRows + threadIdx.x / kLanes;
    if (at >= p.rows) return;
    const Scores row(p.logits + at * p.cols, p.cols);
    Ranks ranks(p, row);
    uint64_t* groups = of_rows[threadIdx.x / kLanes];
    const int size = int(p.cols) / int(p.num_groups);
    const auto is_allowed = [&](int col) { return p.num_groups == 1 || groups[col / size] != 0; };
    if (p.num_groups > 1) choose_groups(p, ranks, groups);
    if constexpr (kHeld != 0) row.each([&](int col, int i) { ranks.held[i] = is_allowed(col) ? ranks.held[i] : 0; });
    int64_t* experts = p.experts + at * p.count;
    uint64_t last = ~uint64_t(0);
    for (int64_t k = 0; k < p.count; ++k) {
      last = ranks.next(last, [&](int col) { return kHeld != 0 || is_allowed(col); });
      if (row.lane == 0) experts[k] = place_of_rank(last);
    }
    __syncwarp();
    write(p, row, at, experts);
  }

  TE_DIST_INLINE void write(const Params& p, const Scores& row, int64_t at, const int64_t* experts) {
    float chosen = 0.0f;
    for (int64_t k = row.lane; k < p.count; k += kLanes) chosen += row.of(int(experts[k]));
    const float divisor = sum_of_lanes(chosen) + kTiny;
    for (int64_t k = row.lane; k < p.count; k += kLanes) {
      const float score = row.of(int(experts[k]));
      p.probabilities[at * p.count + k] = (p.normalizes ? score / divisor : score) * p.factor;
      if (p.counts) atomicAdd(p.counts + experts[k], 1.0f);  // exact, in whatever order
    }
    if (!p.scores) return;
    const float all = kScore == Score::kSigmoid ? row.divisor() : 1.0f;
    row.each_score([&](int col, float score) { p.scores[at * p.cols + col] = score / all; });
  }
};

// A warp for a row.
template <Score kScore, int kHeld>
struct RouteGradient {
  using Scores = RowScores<kScore, kHeld>;
  static constexpr int kThreads = 256, kBlocks = 2, kRows = kThreads / kLanes;

  struct Params {
    const float* logits;     // (rows, cols)
    const int64_t* experts;  // (rows, count)
    const float* grad;       // (rows, count), of the probabilities
    const float* of_scores;  // (cols,), of all scores that add up to one; or null
    int64_t rows;
    int64_t cols;
    int64_t count;
    int64_t normalizes;
    float factor;
    int32_t in_halves;  // whether gradients are two bf16 values, of which the second is what the first one lacks
    void* out;          // f32 (rows, cols); or bf16 (rows, 2 cols)
  };

  // What the gradient of a score is made of: of the probability, where it is chosen, and of what all scores add up to.
  struct Gradients {
    const Params& p;
    const Scores& row;
    const int64_t* experts;
    const float* grad;
    float chosen, mean;            // what chosen scores are divided by, and what is taken from their gradients
    float divisor, mean_of_all;    // the same of all
    float mean_of_logits;          // taken from gradients of a softmax

    TE_DIST_DEVICE Gradients(const Params& p_, const Scores& row_, int64_t at)
        : p(p_), row(row_), experts(p_.experts + at * p_.count), grad(p_.grad + at * p_.count) {
      chosen = 1.0f, mean = 0.0f, divisor = 1.0f, mean_of_all = 0.0f, mean_of_logits = 0.0f;
      if (p.normalizes) {
        chosen = sum_of_chosen([&](int, float score) { return score; }) + kTiny;
        mean = sum_of_chosen([&](int64_t k, float score) { return grad[k] * p.factor * (score / chosen); });
      }
      if (kScore == Score::kSigmoid && p.of_scores) {
        divisor = row.divisor();
        mean_of_all = sum_of_all([&](int col, float score) { return __ldg(p.of_scores + col) * (score / divisor); });
      }
      if constexpr (kScore == Score::kSoftmax) {
        if (p.of_scores) mean_of_logits = sum_of_all([&](int col, float score) { return of_all(col) * score; });
        mean_of_logits += sum_of_chosen([&](int64_t k, float score) { return of_chosen(k) * score; });
      }
    }

    template <class Body>
    TE_DIST_DEVICE float sum_of_chosen(Body body) const {
      float sum = 0.0f;
      for (int64_t k = row.lane; k < p.count; k += kLanes) sum += body(k, row.of(int(experts[k])));
      return sum_of_lanes(sum);
    }

    template <class Body>
    TE_DIST_DEVICE float sum_of_all(Body body) const {
      float sum = 0.0f;
      row.each_score([&](int col, float score) { sum += body(col, score); });
      return sum_of_lanes(sum);
    }

    TE_DIST_DEVICE float of_chosen(int64_t k) const { return gradient_of_chosen(grad[k] * p.factor, mean, chosen); }

    TE_DIST_DEVICE float of_all(int col) const {
      return p.of_scores ? gradient_of_chosen(__ldg(p.of_scores + col), mean_of_all, divisor) : 0.0f;
    }
  };

  TE_DIST_INLINE void run(const Params& p) {
    const int64_t at = int64_t(blockIdx.x) * kRows + threadIdx.x / kLanes;
    if (at >= p.rows) return;
    const Scores row(p.logits + at * p.cols, p.cols);
    const Gradients found(p, row, at);
    const auto write = [&](int col, float grad, float score) {
      store(p, at, col, gradient_of_logit<kScore>(grad, score, found.mean_of_logits));
    };
    row.each_score([&](int col, float score) { write(col, found.of_all(col), score); });
    __syncwarp();
    for (int64_t k = row.lane; k < p.count; k += kLanes) {
      const int col = int(found.experts[k]);
      write(col, found.of_all(col) + found.of_chosen(k), row.of(col));
    }
  }

  TE_DIST_INLINE void store(const Params& p, int64_t at, int col, float value) {
    if (p.in_halves) {
      uint16_t* out = static_cast<uint16_t*>(p.out) + at * 2 * p.cols + col;
      const uint32_t leading = BFloat16::store(value);
      out[0] = uint16_t(leading);
      out[p.cols] = uint16_t(BFloat16::store(value - BFloat16::value(leading, 0)));
    } else {
      static_cast<float*>(p.out)[at * p.cols + col] = value;
    }
  }
};

}  // namespace te_dist::cuda
