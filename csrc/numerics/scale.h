// From the largest magnitude of a tile to its scale, for every codec. All divisions are IEEE fp32 divisions.
#pragma once

#include "minifloat.h"

namespace te_dist {

// Parameters of an fp32 scale. `value_for_inf` replaces a quotient that overflows.
struct FloatScaleRule {
  float max_code;
  float eps;
  float value_for_inf;
  bool pow2;
};

// Multiplier that maps `amax` to the largest code; 1 where amax is zero, infinite or NaN.
template <class Floats>
TE_DIST_INLINE Floats scale_from_amax(Floats amax, const FloatScaleRule& rule) {
  using Integers = IntegersOf<Floats>;
  const Floats one = all<Floats>(1.0f), infinity = float_of(all<Integers>(kInfinityBits));
  amax = amax < all<Floats>(rule.eps) ? all<Floats>(rule.eps) : amax;
  Floats scale = all<Floats>(rule.max_code) / amax;
  scale = scale == infinity ? all<Floats>(rule.value_for_inf) : scale;
  scale = float_of(bits_of(scale) & (rule.pow2 ? 0xFF800000u : 0xFFFFFFFFu));
  scale = amax == Floats{} ? one : scale;
  return amax < infinity ? scale : one;
}

// MXFP8: biased exponent of `value` (not negative) rounded up to a power of two. NaN gives 255, infinity 254.
template <class Floats>
TE_DIST_INLINE IntegersOf<Floats> e8m0_round_up(Floats value) {
  using Integers = IntegersOf<Floats>;
  const Integers bits = bits_of(value) & kMagnitudeMask;
  // Half of 2^-126 is the smallest power of two: what lies below it rounds up to it, not to the next one.
  const Integers up = bits > all<Integers>(0x00400000u) ? (bits + 0x7FFFFFu) >> 23 : Integers{};
  const Integers finite = smaller(up, all<Integers>(0xFEu));
  return bits > all<Integers>(kInfinityBits) ? all<Integers>(0xFFu) : finite;
}

// 2^(exponent - 127); NaN for 255.
template <class Integers>
TE_DIST_INLINE FloatsOf<Integers> e8m0_value(Integers exponent) {
  const Integers bits = exponent == Integers{} ? all<Integers>(0x00400000u) : exponent << 23;
  return float_of(exponent == all<Integers>(255u) ? all<Integers>(0x7FFFFFFFu) : bits);
}

// Its reciprocal, by which data is multiplied.
template <class Integers>
TE_DIST_INLINE FloatsOf<Integers> e8m0_inverse(Integers exponent) {
  const Integers normal = (254u - exponent) << 23;
  const Integers bits = exponent == all<Integers>(254u) ? all<Integers>(0x00400000u) : normal;
  return float_of(exponent == all<Integers>(255u) ? all<Integers>(0x7FFFFFFFu) : bits);
}

constexpr uint32_t kReciprocalOfE4M3Max = 0x3B124925u;  // fp32(1 / 448)
constexpr uint32_t kReciprocalOfE5M2Max = 0x37924925u;  // fp32(1 / 57344)
constexpr uint32_t kReciprocalOf6 = 0x3E2AAAABu;        // fp32(1 / 6)
constexpr uint32_t kReciprocalOf2688 = 0x39C30C31u;     // fp32(1 / (6 * 448))
constexpr uint32_t kReciprocalOf1536 = 0x3A2AAAABu;     // fp32(1 / (6 * 256))

// NVFP4: multiplier that maps the amax of the tensor to 6 * e4m3_max.
TE_DIST_INLINE float nvfp4_tensor_scale(float amax, float e4m3_max) {
  const float scale = capped(e4m3_max * 6.0f / amax, kFloatMax);
  return amax == 0.0f || scale == 0.0f ? 1.0f : scale;
}

// NVFP4: scale byte (e4m3) of a block.
template <class Floats>
TE_DIST_INLINE IntegersOf<Floats> nvfp4_block_code(Floats block_amax, float tensor_scale) {
  return E4M3::encode(capped(block_amax * (tensor_scale * float_of(kReciprocalOf6)), kFloatMax));
}

// NVFP4: multiplier of the elements of a block, given its scale byte.
template <class Integers>
TE_DIST_INLINE FloatsOf<Integers> nvfp4_block_multiplier(Integers code, float tensor_scale) {
  return capped(1.0f / (E4M3::decode(code) * (1.0f / tensor_scale)), kFloatMax);
}

// NVFP4: what a code of a block is multiplied by when it is decoded.
template <class Integers>
TE_DIST_INLINE FloatsOf<Integers> nvfp4_decode_scale(Integers code, float tensor_amax, int e4m3_max) {
  return E4M3::decode(code) * tensor_amax * float_of(e4m3_max == 256 ? kReciprocalOf1536 : kReciprocalOf2688);
}

// NVFP4 four-over-six: scale byte of a block whose largest value shall become 6 (`expand` 1) or 4 (`expand` 1.5).
TE_DIST_INLINE uint32_t nvfp4_four_over_six_code(float block_amax, float tensor_scale, float expand) {
  return E4M3::encode(capped(block_amax / 6.0f * tensor_scale * expand, 448.0f));
}

// NVFP4 four-over-six: difference of a decoded and the true value; its size, or its square, is summed and compared.
template <class Floats>
TE_DIST_INLINE Floats nvfp4_decode_error(IntegersOf<Floats> code, float block_scale, float tensor_amax, float e4m3_max,
                                         Floats value) {
  return E2M1::decode(code) * block_scale * tensor_amax / (6.0f * e4m3_max) - value;
}

}  // namespace te_dist
