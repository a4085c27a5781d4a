// One step of Adam, element by element: the same fp32 operations in the same order on every device.
#pragma once

#include "platform.h"

namespace te_dist {

// What a group of parameters is updated by.
struct AdamRule {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double decoupled;  // 1: the decay is taken from the value (AdamW); 0: it is added to the gradient
  double corrected;  // 1: moments are corrected for their bias toward 0; 0: they are not
};

// What one step multiplies the elements of one parameter by.
struct AdamFactors {
  float beta1, rest1;  // rest: 1 - beta
  float beta2, rest2;
  float eps;
  float step_size;           // lr, corrected for the bias of the first moment
  float inverse_correction;  // of the root of the second moment
  float decay;               // share of the value that is taken from it
  float l2;                  // share of the value that is added to the gradient
  float grad_scale;          // what gradients were multiplied by
};

// base^exponent by squaring, in this order of multiplications: a library's pow differs from device to device.
TE_DIST_INLINE double whole_power(double base, uint32_t exponent) {
  double result = 1.0;
  for (; exponent; exponent >>= 1, base *= base) {
    if (exponent & 1u) result *= base;
  }
  return result;
}

TE_DIST_INLINE double square_root(double value) {
#if defined(__CUDACC_RTC__)
  return __dsqrt_rn(value);
#else
  return __builtin_sqrt(value);
#endif
}

template <class Floats>
TE_DIST_INLINE Floats square_roots(Floats values) {
  if constexpr (sizeof(Floats) == sizeof(float)) {
    return square_root(values);
  } else {
    for (unsigned i = 0; i < sizeof(Floats) / sizeof(float); ++i) values[i] = square_root(values[i]);
    return values;
  }
}

// Of step number `step`, 1 or more.
TE_DIST_INLINE AdamFactors adam_factors(const AdamRule& rule, double lr, float step, float grad_scale) {
  const bool is_corrected = rule.corrected != 0.0;
  const double correction1 = is_corrected ? 1.0 - whole_power(rule.beta1, uint32_t(step)) : 1.0;
  const double correction2 = is_corrected ? square_root(1.0 - whole_power(rule.beta2, uint32_t(step))) : 1.0;
  const bool is_decoupled = rule.decoupled != 0.0;
  AdamFactors factors;
  factors.beta1 = float(rule.beta1), factors.rest1 = float(1.0 - rule.beta1);
  factors.beta2 = float(rule.beta2), factors.rest2 = float(1.0 - rule.beta2);
  factors.eps = float(rule.eps);
  factors.step_size = float(lr / correction1);
  factors.inverse_correction = float(1.0 / correction2);
  factors.decay = is_decoupled ? float(lr * rule.weight_decay) : 0.0f;
  factors.l2 = is_decoupled ? 0.0f : float(rule.weight_decay);
  factors.grad_scale = grad_scale;
  return factors;
}

template <class Floats>
struct AdamState {
  Floats value, exp_avg, exp_avg_sq;
};

template <class Floats>
TE_DIST_INLINE void adam_update(const AdamFactors& f, Floats grad, AdamState<Floats>& state) {
  if (f.grad_scale != 1.0f) grad = grad / f.grad_scale;
  if (f.l2 != 0.0f) grad = grad + f.l2 * state.value;
  if (f.decay != 0.0f) state.value = state.value - f.decay * state.value;
  state.exp_avg = f.beta1 * state.exp_avg + f.rest1 * grad;
  state.exp_avg_sq = f.beta2 * state.exp_avg_sq + f.rest2 * grad * grad;
  const Floats denominator = square_roots(state.exp_avg_sq) * f.inverse_correction + f.eps;
  state.value = state.value - f.step_size * state.exp_avg / denominator;
}

}  // namespace te_dist
