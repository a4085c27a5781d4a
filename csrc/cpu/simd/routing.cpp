#include "../../numerics/routing.h"

#include "kernels_of_level.h"
#include "parallel.h"

namespace te_dist::cpu::TE_DIST_ISA {
namespace {

constexpr int64_t kRowsOfTask = 16;

// What is worked in for a row: a score and a gradient, or a rank, of each column. Threads may have small stacks.
class Memory {
 public:
  explicit Memory(int64_t cols) : cols_(cols), memory_(new uint64_t[size_t(2 * cols)]) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { delete[] memory_; }

  uint64_t* ranks() { return memory_; }
  float* scores() { return reinterpret_cast<float*>(memory_ + cols_); }
  float* found() { return scores() + cols_; }

 private:
  int64_t cols_;
  uint64_t* memory_;
};

// The sum of body(0), body(1), ...: in 32 sums in turn, folded at distances 16, 8, 4, 2 and 1.
template <class Body>
float sum_of(int64_t count, const Body& body) {
  float sums[32] = {};
  for (int64_t i = 0; i < count; ++i) sums[i % 32] += body(i);
  for (int distance = 16; distance; distance /= 2) {
    for (int i = 0; i < distance; ++i) sums[i] += sums[i + distance];
  }
  return sums[0];
}

// Scores of a row of logits.
void find_scores(const RoutingRule& rule, const float* logits, int64_t cols, float* scores) {
  if (rule.score == Score::kSigmoid) {
    for (int64_t col = 0; col < cols; ++col) scores[col] = sigmoid(logits[col]);
    return;
  }
  float most = -float_of(kInfinityBits);
  for (int64_t col = 0; col < cols; ++col) most = larger(logits[col], most);
  for (int64_t col = 0; col < cols; ++col) scores[col] = exp_of_negative(logits[col] - most);
  const float total = sum_of(cols, [&](int64_t col) { return scores[col]; });
  for (int64_t col = 0; col < cols; ++col) scores[col] = scores[col] / total;
}

float divisor_of(const float* scores, int64_t cols) {
  return sum_of(cols, [&](int64_t col) { return scores[col]; }) + kTiny;
}

// Moves the largest `count` of ranks, which are different, to the front, in their order.
void keep_largest(uint64_t* ranks, int64_t number, int64_t count) {
  for (int64_t k = 0; k < count; ++k) {
    int64_t largest = k;
    for (int64_t i = k + 1; i < number; ++i) largest = ranks[i] > ranks[largest] ? i : largest;
    const uint64_t found = ranks[largest];
    ranks[largest] = ranks[k];
    ranks[k] = found;
  }
}

// Ranks of the columns that may be chosen; how many these are.
int64_t find_ranks(const Route& op, const float* scores, uint64_t* ranks) {
  const auto value = [&](int64_t col) { return scores[col] + (op.bias ? op.bias[col] : 0.0f); };
  const int64_t groups = op.rule.num_groups, size = op.cols / groups;
  if (groups == 1) {
    for (int64_t col = 0; col < op.cols; ++col) ranks[col] = rank_of(value(col), uint32_t(col));
    return op.cols;
  }
  uint64_t of_groups[kMostExpertGroups];
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t i = 0; i < size; ++i) ranks[i] = rank_of(value(group * size + i), uint32_t(group * size + i));
    keep_largest(ranks, size, size > 1 ? 2 : 1);
    const float best = value_of_rank(ranks[0]);
    of_groups[group] = rank_of(size > 1 ? best + value_of_rank(ranks[1]) : best, uint32_t(group));
  }
  keep_largest(of_groups, groups, op.rule.top_groups);
  int64_t number = 0;
  for (int64_t k = 0; k < op.rule.top_groups; ++k) {
    const int64_t first = place_of_rank(of_groups[k]) * size;
    for (int64_t col = first; col < first + size; ++col) ranks[number++] = rank_of(value(col), uint32_t(col));
  }
  return number;
}

void route_row(const Route& op, int64_t row, Memory& memory) {
  float* scores = memory.scores();
  uint64_t* ranks = memory.ranks();
  find_scores(op.rule, op.logits + row * op.cols, op.cols, scores);
  keep_largest(ranks, find_ranks(op, scores, ranks), op.count);
  const auto chosen = [&](int64_t k) { return scores[place_of_rank(ranks[k])]; };
  const float divisor = sum_of(op.count, chosen) + kTiny;
  for (int64_t k = 0; k < op.count; ++k) {
    op.experts[row * op.count + k] = place_of_rank(ranks[k]);
    op.probabilities[row * op.count + k] = (op.rule.normalizes ? chosen(k) / divisor : chosen(k)) * op.rule.factor;
  }
  if (!op.scores) return;
  const float all = op.rule.score == Score::kSigmoid ? divisor_of(scores, op.cols) : 1.0f;
  for (int64_t col = 0; col < op.cols; ++col) op.scores[row * op.cols + col] = scores[col] / all;
}

template <Score kScore>
void find_gradient(const RouteGradient& op, int64_t row, Memory& memory) {
  float *scores = memory.scores(), *found = memory.found();
  find_scores(op.rule, op.logits + row * op.cols, op.cols, scores);
  const int64_t* experts = op.experts + row * op.count;
  const auto chosen = [&](int64_t k) { return scores[experts[k]]; };
  const auto grad = [&](int64_t k) { return op.grad[row * op.count + k] * op.rule.factor; };
  float total = 1.0f, mean = 0.0f, divisor = 1.0f, mean_of_all = 0.0f, mean_of_logits = 0.0f;
  if (op.rule.normalizes) {
    total = sum_of(op.count, chosen) + kTiny;
    mean = sum_of(op.count, [&](int64_t k) { return grad(k) * (chosen(k) / total); });
  }
  if (kScore == Score::kSigmoid && op.of_scores) {
    divisor = divisor_of(scores, op.cols);
    mean_of_all = sum_of(op.cols, [&](int64_t col) { return op.of_scores[col] * (scores[col] / divisor); });
  }
  const auto of_chosen = [&](int64_t k) { return gradient_of_chosen(grad(k), mean, total); };
  const auto of_all = [&](int64_t col) {
    return op.of_scores ? gradient_of_chosen(op.of_scores[col], mean_of_all, divisor) : 0.0f;
  };
  if (kScore == Score::kSoftmax) {
    if (op.of_scores) mean_of_logits = sum_of(op.cols, [&](int64_t col) { return of_all(col) * scores[col]; });
    mean_of_logits += sum_of(op.count, [&](int64_t k) { return of_chosen(k) * chosen(k); });
  }
  for (int64_t col = 0; col < op.cols; ++col) {
    found[col] = gradient_of_logit<kScore>(of_all(col), scores[col], mean_of_logits);
  }
  for (int64_t k = 0; k < op.count; ++k) {
    found[experts[k]] = gradient_of_logit<kScore>(of_all(experts[k]) + of_chosen(k), chosen(k), mean_of_logits);
  }
}

void store(const RouteGradient& op, int64_t row, const float* found) {
  if (!op.in_halves) {
    float* out = static_cast<float*>(op.out) + row * op.cols;
    for (int64_t col = 0; col < op.cols; ++col) out[col] = found[col];
    return;
  }
  uint16_t* out = static_cast<uint16_t*>(op.out) + row * 2 * op.cols;
  for (int64_t col = 0; col < op.cols; ++col) {
    const uint32_t leading = encode_bfloat16(found[col]);
    out[col] = uint16_t(leading);
    out[op.cols + col] = uint16_t(encode_bfloat16(found[col] - decode_bfloat16(leading)));
  }
}

// body(row, memory) for all rows.
template <class Body>
void for_rows(int64_t rows, int threads, const Body& body, int64_t cols) {
  parallel_for((rows + kRowsOfTask - 1) / kRowsOfTask, threads, [&](int64_t task) {
    Memory memory(cols);
    for (int64_t row = task * kRowsOfTask; row < rows && row < (task + 1) * kRowsOfTask; ++row) body(row, memory);
  });
}

}  // namespace

void route(const Route& op, int threads) {
  for_rows(op.rows, threads, [&](int64_t row, Memory& memory) { route_row(op, row, memory); }, op.cols);
  if (!op.counts) return;
  for (int64_t col = 0; col < op.cols; ++col) op.counts[col] = 0.0f;
  for (int64_t i = 0; i < op.rows * op.count; ++i) op.counts[op.experts[i]] += 1.0f;
}

void route_gradient(const RouteGradient& op, int threads) {
  const auto body = [&](int64_t row, Memory& memory) {
    if (op.rule.score == Score::kSoftmax) find_gradient<Score::kSoftmax>(op, row, memory);
    if (op.rule.score == Score::kSigmoid) find_gradient<Score::kSigmoid>(op, row, memory);
    store(op, row, memory.found());
  };
  for_rows(op.rows, threads, body, op.cols);
}

}  // namespace te_dist::cpu::TE_DIST_ISA
