// What a router makes of a row of logits: scores, their order, probabilities, and the gradients of these.
#pragma once

#include "activation.h"

namespace te_dist {

enum class Score { kSoftmax, kSigmoid };

constexpr float kTiny = 1e-20f;     // beside a sum of scores that is divided by
constexpr int kMostExperts = 8192, kMostExpertGroups = 256;

// Values in their order, of equal ones that of the first place the largest; NaN is above all others. Never 0 or all
// ones.
TE_DIST_INLINE uint64_t rank_of(float value, uint32_t place) {
  const uint32_t bits = bits_of(value + 0.0f);  // of zeros one
  const uint32_t order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t(value != value ? 0xFFFFFFFFu : order) << 32 | (0xFFFFFFFEu - place);
}

TE_DIST_INLINE uint32_t place_of_rank(uint64_t rank) { return 0xFFFFFFFEu - uint32_t(rank); }

TE_DIST_INLINE float value_of_rank(uint64_t rank) {
  const uint32_t order = uint32_t(rank >> 32);
  return float_of(order == 0xFFFFFFFFu || order & 0x80000000u ? order & kMagnitudeMask : ~order);
}

// Derivatives. Of a chosen score, of the probabilities: `grad` is that of its own, times the factor of all; `total` the
// sum of the chosen scores, `mean` that of gradients weighted by probabilities, where these are divided by the sum.
TE_DIST_INLINE float gradient_of_chosen(float grad, float mean, float total) { return (grad - mean) / total; }

// Of a logit, of its score's, `grad`; `mean`: those of all scores, weighted by scores, for a softmax.
template <Score kScore>
TE_DIST_INLINE float gradient_of_logit(float grad, float score, float mean) {
  return kScore == Score::kSoftmax ? score * (grad - mean) : grad * (score * (1.0f - score));
}

}  // namespace te_dist
