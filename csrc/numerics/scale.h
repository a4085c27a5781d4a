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
TE_DIST_INLINE float scale_from_amax(float amax, const FloatScaleRule& rule) {
  amax = amax < rule.eps ? rule.eps : amax;
  const uint32_t amax_bits = bits_of(amax);
  const bool unusable = amax_bits == 0 || amax_bits >= kInfinityBits;
  float scale = rule.max_code / amax;
  scale = bits_of(scale) == kInfinityBits ? rule.value_for_inf : scale;
  const uint32_t mantissa_mask = rule.pow2 ? 0xFF800000u : 0xFFFFFFFFu;
  scale = float_of(bits_of(scale) & mantissa_mask);
  return unusable ? 1.0f : scale;
}

// MXFP8: biased exponent of `value` rounded up to a power of two. NaN gives 255, infinity 254.
TE_DIST_INLINE uint32_t e8m0_round_up(float value) {
  const uint32_t bits = bits_of(value) & kMagnitudeMask;
  const uint32_t exponent = bits >> 23;
  const uint32_t mantissa = bits & 0x7FFFFFu;
  const bool rounds_to_smallest = exponent == 0 && mantissa <= 0x400000u;
  const bool up = mantissa > 0 && exponent < 0xFEu && !rounds_to_smallest;
  const uint32_t finite = exponent + (up ? 1u : 0u);
  const uint32_t special = mantissa > 0 ? 0xFFu : 0xFEu;
  return exponent == 0xFFu ? special : finite;
}

// 2^(exponent - 127); NaN for 255.
TE_DIST_INLINE float e8m0_value(uint32_t exponent) {
  const uint32_t bits = exponent == 0 ? 0x00400000u : exponent << 23;
  return float_of(exponent == 255 ? 0x7FFFFFFFu : bits);
}

// Its reciprocal, by which data is multiplied.
TE_DIST_INLINE float e8m0_inverse(uint32_t exponent) {
  const uint32_t bits = exponent == 254 ? 0x00400000u : (254u - exponent) << 23;
  return float_of(exponent == 255 ? 0x7FFFFFFFu : bits);
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
TE_DIST_INLINE uint32_t nvfp4_block_code(float block_amax, float tensor_scale) {
  return E4M3::encode(capped(block_amax * (tensor_scale * float_of(kReciprocalOf6)), kFloatMax));
}

// NVFP4: multiplier of the elements of a block, given its scale byte.
TE_DIST_INLINE float nvfp4_block_multiplier(uint32_t code, float tensor_scale) {
  return capped(1.0f / (E4M3::decode(code) * (1.0f / tensor_scale)), kFloatMax);
}

// NVFP4: what a code of a block is multiplied by when it is decoded.
TE_DIST_INLINE float nvfp4_decode_scale(uint32_t code, float tensor_amax, int e4m3_max) {
  return E4M3::decode(code) * tensor_amax * float_of(e4m3_max == 256 ? kReciprocalOf1536 : kReciprocalOf2688);
}

// NVFP4 four-over-six: scale byte of a block whose largest value shall become `expand` / 1.5 of 6 (1: six, 1.5: four).
TE_DIST_INLINE uint32_t nvfp4_four_over_six_code(float block_amax, float tensor_scale, float expand) {
  return E4M3::encode(capped(block_amax / 6.0f * tensor_scale * expand, 448.0f));
}

// NVFP4 four-over-six: error of one decoded value, the quantity that is summed and compared.
TE_DIST_INLINE float nvfp4_decode_error(uint32_t code, float block_scale, float tensor_amax, float e4m3_max, float value) {
  return E2M1::decode(code) * block_scale * tensor_amax / (6.0f * e4m3_max) - value;
}

}  // namespace te_dist
