// Casts between fp32 and small floating-point types, bit exact, round to nearest even. No branches: compilers vectorize
// them.
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
  static constexpr uint32_t kSpecial = kSpecialCode;
  static constexpr uint32_t kClamp = kClampBits;

  // What has to be added to `rounded + (exponent >> kShift)` below to make the code, modulo 2^(kMagnitudeBits + 1).
  // Even, so that adding it before rounding leaves ties alone.
  static constexpr uint32_t kCodeOffset = (0u - ((128 - kBias) << kMantissaBits)) & (2 * kSignCode - 1);
  static_assert(kCodeOffset % 2 == 0, "an odd offset would round ties the other way");

  // Code of a magnitude (fp32 bits, at most kClampBits), to nearest even, in the low kMagnitudeBits; bits above are not
  // defined. Adding a power of two whose last place is the spacing of this type rounds in one step, for normal and for
  // subnormal results alike.
  template <class Integers>
  TE_DIST_INLINE Integers round_magnitude(Integers magnitude) {
    const Integers exponent = larger(magnitude & kInfinityBits, all<Integers>(kMinNormalBits));
    const Integers spacing = exponent + ((uint32_t(kShift) << 23) + kCodeOffset);
    return bits_of(float_of(magnitude) + float_of(spacing)) + (exponent >> kShift);
  }

  // Saturating cast to nearest even; the sign of zero is kept.
  template <class Floats>
  TE_DIST_INLINE IntegersOf<Floats> encode(Floats value) {
    using Integers = IntegersOf<Floats>;
    const Integers bits = bits_of(value);
    const Integers magnitude = bits & kMagnitudeMask;
    const Integers code = round_magnitude(smaller(magnitude, all<Integers>(kClampBits))) & kCodeMask;
    const Integers sign = (bits >> (31 - kMagnitudeBits)) & kSignCode;
    return magnitude > all<Integers>(kInfinityBits) ? all<Integers>(kNanCode) : code | sign;
  }

  template <class Integers>
  TE_DIST_INLINE FloatsOf<Integers> decode(Integers code) {
    const Integers magnitude = code & kCodeMask;
    const Integers shifted = magnitude << kShift;
    const Integers normal = shifted + ((127 - kBias) << 23);
    const Integers subnormal = bits_of(float_of(shifted | kMinNormalBits) - float_of(all<Integers>(kMinNormalBits)));
    Integers bits = magnitude < all<Integers>(1u << kMantissaBits) ? subnormal : normal;
    if constexpr (kSpecialCode <= kCodeMask) {
      bits = magnitude >= all<Integers>(kSpecialCode) ? shifted | kInfinityBits : bits;
    }
    return float_of(bits | ((code & kSignCode) << (31 - kMagnitudeBits)));
  }
};

using E4M3 = MiniFloat<4, 3, 0x43E00000u /* 448 */, 0x7Fu, 0x7Fu>;
using E5M2 = MiniFloat<5, 2, 0x47600000u /* 57344 */, 0x7Fu, 0x7Cu>;
using E2M1 = MiniFloat<2, 1, 0x40C00000u /* 6 */, 0x7u, 0x8u>;
using Half = MiniFloat<5, 10, 0x47800000u /* 2^16, the code of infinity */, 0x7FFFu, 0x7C00u>;

// Stochastic cast to e2m1: adds `noise` / 256 of a step and truncates. NaN becomes +6.
template <class Floats>
TE_DIST_INLINE IntegersOf<Floats> encode_e2m1_stochastic(Floats value, Floats noise) {
  using Integers = IntegersOf<Floats>;
  const Integers bits = bits_of(value);
  const Floats size = magnitude(value);
  Floats step = size < all<Floats>(4.0f) ? all<Floats>(1.0f) : all<Floats>(2.0f);
  step = size < all<Floats>(2.0f) ? all<Floats>(0.5f) : step;
  const Floats raised = capped(size + noise * 0.00390625f * step, 6.0f);
  const Integers below_one = raised < all<Floats>(0.5f) ? Integers{} : all<Integers>(1u);
  const Integers code = raised < all<Floats>(1.0f) ? below_one : (bits_of(raised) >> 22) - 252u;
  const Integers sign = (bits >> 28) & 0x8u;
  return bits_of(size) > all<Integers>(kInfinityBits) ? all<Integers>(0x7u) : code | sign;
}

// Code of a bf16 value in the low half. To nearest even; NaN becomes 0x7FFF, as NVIDIA GPUs convert it.
template <class Floats>
TE_DIST_INLINE IntegersOf<Floats> encode_bfloat16(Floats value) {
  using Integers = IntegersOf<Floats>;
  const Integers bits = bits_of(value);
  const Integers rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return (bits & kMagnitudeMask) > all<Integers>(kInfinityBits) ? all<Integers>(0x7FFFu) : rounded;
}

template <class Integers>
TE_DIST_INLINE FloatsOf<Integers> decode_bfloat16(Integers code) {
  return float_of(code << 16);
}

}  // namespace te_dist
