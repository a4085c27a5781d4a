// The exponential function and what is made of it: the same bits on every CPU and GPU, by a polynomial of written
// multiply-adds. Bounds hold where the result is a normal number.
#pragma once

#include "platform.h"

namespace te_dist {

// e^x for x <= 0, within 1 ulp; 0 from -87.7 down.
template <class Floats>
TE_DIST_INLINE Floats exp_of_negative(Floats x) {
  // x = n ln 2 + r. Adding 1.5 * 2^23 leaves n in the low bits; ln 2 comes in two parts, of which the first has zeros for
  // the bits of n.
  constexpr float kLog2E = 0x1.715476p+0f, kRound = 12582912.0f, kLn2High = 0x1.62e400p-1f, kLn2Low = 0x1.7f7d1cp-20f;
  const Floats limited = at_least(x, -88.0f);
  const Floats shifted = multiply_add(limited, all<Floats>(kLog2E), all<Floats>(kRound));
  const Floats n = shifted - kRound;
  Floats r = multiply_add(n, all<Floats>(-kLn2High), limited);
  r = multiply_add(n, all<Floats>(-kLn2Low), r);
  // The least relative error of degree 6 with both first coefficients 1: 3e-9.
  Floats sum = all<Floats>(0x1.6a215ap-10f);
  sum = multiply_add(sum, r, all<Floats>(0x1.123b9cp-7f));
  sum = multiply_add(sum, r, all<Floats>(0x1.5558fcp-5f));
  sum = multiply_add(sum, r, all<Floats>(0x1.555490p-3f));
  sum = multiply_add(sum, r, all<Floats>(0x1.fffffcp-2f));
  sum = multiply_add(sum, r, all<Floats>(1.0f));
  sum = multiply_add(sum, r, all<Floats>(1.0f));
  return sum * float_of((bits_of(shifted) << 23) + 0x3F800000u);
}

// 1 / (1 + e^-x), within 3 ulp.
template <class Floats>
TE_DIST_INLINE Floats sigmoid(Floats x) {
  const Floats power = exp_of_negative(float_of(bits_of(x) | 0x80000000u));
  return (x < Floats{} ? power : all<Floats>(1.0f)) * reciprocal_below_one(power + 1.0f);
}

// x sigmoid(x), within 4 ulp.
template <class Floats>
TE_DIST_INLINE Floats silu(Floats x) {
  return x * sigmoid(x);
}

template <class Floats>
TE_DIST_INLINE Floats swiglu(Floats gate, Floats up) {
  return silu(gate) * up;
}

// Derivative of swiglu by `gate`, times `grad`.
template <class Floats>
TE_DIST_INLINE Floats swiglu_gradient_of_gate(Floats grad, Floats gate, Floats up) {
  const Floats s = sigmoid(gate);
  return grad * up * (s * multiply_add(gate, 1.0f - s, all<Floats>(1.0f)));
}

// Derivative of swiglu by `up`, times `grad`.
template <class Floats>
TE_DIST_INLINE Floats swiglu_gradient_of_up(Floats grad, Floats gate) {
  return grad * silu(gate);
}

// 1 / sqrt(mean + eps) of `count` squares.
TE_DIST_INLINE float rms_rstd(float sum_of_squares, float count, float eps) {
  return 1.0f / square_root(sum_of_squares / count + eps);
}

}  // namespace te_dist
