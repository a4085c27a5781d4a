// NVFP4: which of two scales of a tile loses less, its largest value becoming 6 or 4.
#pragma once

#include "codes.cuh"

namespace te_dist::cuda {

enum class FourOverSix { kNone, kMeanAbsolute, kMeanSquare };

// RN(a / divisor) for 2688 and 1536, whose quotient by the reciprocal is off by little enough for one correction, for
// every mantissa of `a`; no intermediate may leave the normal numbers.
TE_DIST_INLINE float divided(float a, float divisor, float reciprocal) {
  const float quotient = a * reciprocal;
  return __fmaf_rn(__fmaf_rn(-quotient, divisor, a), reciprocal, quotient);
}

// Errors of values under one scale byte.
template <FourOverSix kNorm>
struct DecodeErrors {
  // Tensor amaxes in this range, or zero, keep every product and quotient below among the normal numbers.
  TE_DIST_INLINE bool is_ordinary(float tensor_amax) {
    return tensor_amax == 0.0f || (tensor_amax > 0x1p-80f && tensor_amax < 0x1p80f);
  }

  float multiplier, block_scale, tensor_amax, e4m3_max;
  float rise, rest;  // of what codes decode to: see `ordinary`

  TE_DIST_DEVICE DecodeErrors(uint32_t code, float multiplier, float tensor_amax, float e4m3_max)
      : multiplier(multiplier), block_scale(E4M3::decode(code)), tensor_amax(tensor_amax), e4m3_max(e4m3_max) {
    const float divisor = 6.0f * e4m3_max;
    const float reciprocal = float_of(e4m3_max == 256.0f ? kReciprocalOf1536 : kReciprocalOf2688);
    const float of_one = divided(block_scale * tensor_amax, divisor, reciprocal);
    const float of_one_and_a_half = divided(1.5f * block_scale * tensor_amax, divisor, reciprocal);
    rise = 2.0f * (of_one_and_a_half - of_one);
    rest = of_one - rise;
  }

  // As nvfp4_decode_error; of the magnitude, whose error has the same size. An e2m1 value is 1 or 1.5 times a power of two
  // or zero, and decodes to that power times what 1 or 1.5 decodes to: `rise` * value + `rest` * power, both exact.
  TE_DIST_DEVICE float ordinary(float size) const {
    const float value = float_of(round_e2m1<false>(size * multiplier, 0) << 22) * 0x1p126f;
    const float power = float_of(bits_of(value) & kInfinityBits);
    return weighed(__fmaf_rn(value, rise, power * rest) - size);
  }

  TE_DIST_DEVICE float any(float value) const {
    const uint32_t code = E2M1::encode(value * multiplier);
    return weighed(nvfp4_decode_error(code, block_scale, tensor_amax, e4m3_max, value));
  }

  TE_DIST_INLINE float weighed(float difference) {
    return kNorm == FourOverSix::kMeanSquare ? difference * difference : fabsf(difference);
  }
};

}  // namespace te_dist::cuda
