// Values to codes by the instructions of the GPU; the same codes as csrc/numerics computes.
#pragma once

#include "../../numerics/scale.h"
#include "types.cuh"

namespace te_dist::cuda {

// Codes of two values, the first in the low byte: saturating, to nearest even, 0x7F for NaN.
template <class Code>
TE_DIST_INLINE uint32_t encode_pair(float first, float second) {
  uint16_t codes;
  if constexpr (Code::kShift == E4M3::kShift) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  }
  return codes;
}

// Codes of four values, the first in the lowest byte.
template <class Code>
TE_DIST_INLINE uint32_t encode_four(float a, float b, float c, float d) {
  return encode_pair<Code>(a, b) | encode_pair<Code>(c, d) << 16;
}

// Magnitudes of e2m1 codes are 2 a, a + 2 and a / 2 + 4, whichever is the smallest, and at most 7. Added to a power of two
// whose last place is the unit of each, a magnitude is rounded to an integer in the low bits, in one step, to nearest even
// or toward zero as `add` rounds; the smallest is found afterwards. What is not a number loses every comparison: it
// becomes 7, the sign of a product of it being positive.
template <class Add>
TE_DIST_INLINE uint32_t e2m1_code(float value, const Add& add) {
  constexpr int kHalves = 0x4A800000, kUnits = 0x4B000000, kPairs = 0x4B800000;  // 2^22, 2^23, 2^24
  const float size = fabsf(value);
  const int below_two = int(bits_of(add(size, 4194304.0f)));
  const int below_four = int(bits_of(add(size, 8388610.0f))) - (kUnits - kHalves);
  const int rest = int(bits_of(add(size, 16777224.0f))) - (kPairs - kHalves);
  const int code = min(min(rest, kHalves + 7), min(below_four, below_two));
  const uint32_t top = bits_of(value) >> 28;
  return ((uint32_t(code) ^ top) & 7u) ^ top;  // the sign, and three bits of the code: one instruction
}

TE_DIST_INLINE uint32_t encode_e2m1(float value) {
  return e2m1_code(value, [](float a, float b) { return __fadd_rn(a, b); });
}

// As encode_e2m1_stochastic of csrc/numerics.
TE_DIST_INLINE uint32_t encode_e2m1_noisy(float value, float noise) {
  const float size = fabsf(value);
  const float step = size < 2.0f ? 0.001953125f : size < 4.0f ? 0.00390625f : 0.0078125f;  // / 256
  const float raised = fminf(size + noise * step, 6.0f);
  return e2m1_code(copysignf(raised, value), [](float a, float b) { return __fadd_rz(a, b); });
}

// Values of two codes, of which the first lies in the low byte. FP8 is exact in fp16.
template <class Code>
TE_DIST_INLINE float2 decode_pair(uint32_t codes) {
  uint32_t halves;
  if constexpr (Code::kShift == E4M3::kShift) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(codes)));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(codes)));
  }
  return make_float2(Float16::value(halves, 0), Float16::value(halves, 1));
}

}  // namespace te_dist::cuda
