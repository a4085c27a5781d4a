// Casts between fp32 and small floating-point types, bit exact, round to nearest even. No branches: compilers vectorize them.
#pragma once

#include "platform.h"

namespace te_dist {

// A sign, kExponentBits, kMantissaBits; IEEE-like bias and subnormals.
//   kClampBits   fp32 bits of the largest magnitude that is encoded: larger ones, infinity included, become this
//   kNanCode     what a NaN becomes
//   kSpecialCode codes from here on stand for infinity or NaN
template <int kExponentBits, int kMantissaBits, uint32_t kClampBits, uint32_t kNanCode, uint32_t kSpecialCode>
struct MiniFloat {
  static constexpr int kMagnitudeBits = kExponentBits + kMantissaBits;
  static constexpr uint32_t kCodeMask = (1u << kMagnitudeBits) - 1;
  static constexpr uint32_t kSignCode = 1u << kMagnitudeBits;
  static constexpr int kShift = 23 - kMantissaBits;
  static constexpr uint32_t kBias = (1u << (kExponentBits - 1)) - 1;
  static constexpr uint32_t kMinNormalBits = (128 - kBias) << 23;
  static constexpr uint32_t kNan = kNanCode;
  static constexpr uint32_t kClamp = kClampBits;

  // Exponent, in code units, that `round_magnitude` adds on top of the code.
  static constexpr uint32_t kCodeOffset = (128 - kBias) << kMantissaBits;

  // Code of a magnitude (fp32 bits, at most kClampBits), to nearest even. Adding a power of two whose last place is the
  // spacing of this type rounds in one step, for normal and for subnormal results alike.
  TE_DIST_INLINE uint32_t round_magnitude(uint32_t magnitude) {
    uint32_t exponent = magnitude & kInfinityBits;
    exponent = exponent > kMinNormalBits ? exponent : kMinNormalBits;
    const uint32_t rounded = bits_of(float_of(magnitude) + float_of(exponent + (uint32_t(kShift) << 23)));
    return (rounded + (exponent >> kShift) - kCodeOffset) & kCodeMask;
  }

  // Saturating cast to nearest even; the sign of zero is kept.
  TE_DIST_INLINE uint32_t encode(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & kMagnitudeMask;
    const uint32_t clamped = magnitude < kClampBits ? magnitude : kClampBits;
    const uint32_t code = round_magnitude(clamped) | ((bits >> (31 - kMagnitudeBits)) & kSignCode);
    return magnitude > kInfinityBits ? kNanCode : code;
  }

  TE_DIST_INLINE float decode(uint32_t code) {
    const uint32_t magnitude = code & kCodeMask;
    const uint32_t shifted = magnitude << kShift;
    const uint32_t normal = shifted + ((127 - kBias) << 23);
    const uint32_t subnormal = bits_of(float_of(shifted | kMinNormalBits) - float_of(kMinNormalBits));
    uint32_t bits = magnitude < (1u << kMantissaBits) ? subnormal : normal;
    bits = magnitude >= kSpecialCode ? shifted | kInfinityBits : bits;
    return float_of(bits | ((code & kSignCode) << (31 - kMagnitudeBits)));
  }
};

using E4M3 = MiniFloat<4, 3, 0x43E00000u /* 448 */, 0x7Fu, 0x7Fu>;
using E5M2 = MiniFloat<5, 2, 0x47600000u /* 57344 */, 0x7Fu, 0x7Cu>;
using E2M1 = MiniFloat<2, 1, 0x40C00000u /* 6 */, 0x7u, 0x8u>;
using Half = MiniFloat<5, 10, 0x47800000u /* 2^16, the code of infinity */, 0x7FFFu, 0x7C00u>;

// Stochastic cast to e2m1: adds `noise` / 256 of a step and truncates. NaN becomes +6.
TE_DIST_INLINE uint32_t encode_e2m1_stochastic(float value, uint32_t noise) {
  const uint32_t bits = bits_of(value);
  const float magnitude = float_of(bits & kMagnitudeMask);
  const float step = magnitude < 2.0f ? 0.5f : magnitude < 4.0f ? 1.0f : 2.0f;
  const float raised = capped(magnitude + float(noise) * 0.00390625f * step, 6.0f);
  const uint32_t normal = (bits_of(raised) >> 22) - 252;
  const uint32_t code = raised < 1.0f ? (raised < 0.5f ? 0u : 1u) : normal;
  return (bits & kMagnitudeMask) > kInfinityBits ? 0x7u : code | ((bits >> 28) & 0x8u);
}

TE_DIST_INLINE float decode_bfloat16(uint16_t code) { return float_of(uint32_t(code) << 16); }

// To nearest even; NaN becomes 0x7FFF, as the conversion instruction of NVIDIA GPUs has it.
TE_DIST_INLINE uint16_t encode_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return uint16_t((bits & kMagnitudeMask) > kInfinityBits ? 0x7FFFu : rounded);
}

}  // namespace te_dist
