// Codes to the 16-bit values that tensor cores multiply: 16 at a time, pairs in 32-bit words.
//
// Magnitudes of codes, moved to where the 16-bit type has exponent and mantissa, are the value times a negative power of
// two, subnormals included. One product with the scale and what the value lacks makes it whole. Every product is exact,
// but for bf16 values below 2^-126.
#pragma once

#include "types.cuh"
#include "wgmma_halves.cuh"

namespace te_dist::cuda {

constexpr int kStep = 64;   // summed values in a buffer: rows of 128 bytes
constexpr int kChunk = 16;  // codes that are decoded together
constexpr int kPairs = kChunk / 2;
constexpr uint32_t kSigns = 0x80008000u;

// How codes are scaled before they are multiplied: not at all, by e8m0 bytes, or by e4m3 bytes.
enum class Scaling { kNone, kPowers, kFloats };

TE_DIST_INLINE uint32_t both(uint32_t half) { return half * 0x10001u; }
TE_DIST_INLINE uint32_t pair(uint32_t low, uint32_t high) { return (low & 0xFFFFu) | high << 16; }

template <HalfType kType>
TE_DIST_INLINE uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  uint32_t product;
  if constexpr (kType == HalfType::kBFloat16) {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  }
  return product;
}

TE_DIST_INLINE uint32_t larger_pairs(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// Two bytes of e4m3 as fp16.
TE_DIST_INLINE uint32_t halves_of_e4m3(uint32_t bytes) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(bytes)));
  return halves;
}

// What pairs are multiplied by: one word for all of them, or one for each.
template <int kCount>
struct Multipliers {
  uint32_t words[kCount];
  uint32_t largest = 0;  // scale byte
};

// What is too large for a single product: then codes are decoded once more, with care.
struct Watch {
  uint32_t magnitudes = 0;  // largest, of both halves
  uint32_t scale = 0;       // largest byte
};

// In which order a run of codes becomes pairs: j and j + kDistance of every 2 kDistance, for j from 0 on. Of every order
// some codes are taken apart quickest; a product only asks for the same in both operands.
TE_DIST_INLINE constexpr int place_of(int index, int distance) {
  return index / (2 * distance) * (2 * distance) + index % distance * 2 + index / distance % 2;
}

// kBits: of a code. kDistance: of the order that is quickest. kLeftOut: what values lack of a factor, to be given to the
// products.
template <class Code, Scaling kScaling, HalfType kType>
struct Decoder;

// FP8 to bf16. NaN, infinity, and scales too large for a single product take a longer way.
template <class Code>
struct ByteDecoder {
  static constexpr int kBits = 8;
  static constexpr int kDistance = 2;
  static constexpr float kLeftOut = 1.0f;
  static constexpr int kUp = Code::kShift - 16;           // from a code to its place in bf16
  static constexpr uint32_t kUnbias = 127 - Code::kBias;  // binary orders that it lacks there
  static constexpr uint32_t kSpecial = Code::kSpecial << kUp;

  // Of two scale bytes, each the low byte of a half.
  TE_DIST_INLINE uint32_t multiplier(uint32_t exponents) { return (exponents << 7) + both(kUnbias << 7); }

  TE_DIST_INLINE Multipliers<1> unscaled() { return {{multiplier(both(127))}}; }

  TE_DIST_INLINE Multipliers<1> of_all(uint32_t byte) { return {{multiplier(both(byte))}, byte}; }

  TE_DIST_INLINE Multipliers<kPairs> of_each(const uint32_t (&bytes)[4]) {
    Multipliers<kPairs> result;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const uint32_t exponents = __byte_perm(bytes[i / 2], 0, i % 2 ? 0x4342 : 0x4140);
      largest = larger_pairs(largest, exponents);
      result.words[i] = multiplier(exponents);
    }
    result.largest = max(largest & 0xFFFFu, largest >> 16);
    return result;
  }

  // NaN and infinity look like numbers when they are moved, and powers of two beyond the largest multiplier wrap around.
  TE_DIST_INLINE bool needs_care(const Watch& seen) {
    return ((seen.magnitudes + both(0x8000u - kSpecial)) & kSigns) || seen.scale > 254 - kUnbias;
  }

  template <int kDistance, bool kCareful, int kCount>
  TE_DIST_INLINE void decode(const uint32_t (&codes)[4], const Multipliers<kCount>& by, uint32_t (&values)[kPairs],
                             Watch& seen) {
    static_assert(kDistance == 1 || kCount == 1, "pairs that have multipliers of their own lie side by side");
    seen.scale = max(seen.scale, by.largest);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const uint32_t word = codes[kDistance == 4 ? i / 4 * 2 : i / 2], multiplier = by.words[i % kCount];
      if (kDistance == 2 && i % 2) {
        values[i] = multiplied<kCareful>(word >> (8 - kUp), word, multiplier, seen);
      } else {
        const uint32_t low = kDistance == 1   ? __byte_perm(word, 0, i % 2 ? 0x4342 : 0x4140)
                             : kDistance == 4 ? __byte_perm(word, codes[i / 4 * 2 + 1], 0x0400 + i % 4 * 0x0101)
                                              : word;
        values[i] = decode_pair<kCareful>(low, multiplier, seen);
      }
    }
  }

  // Of codes in the low bytes of both halves; whatever is in the others.
  template <bool kCareful>
  TE_DIST_INLINE uint32_t decode_pair(uint32_t low, uint32_t multiplier, Watch& seen) {
    return multiplied<kCareful>(low << kUp, low << 8, multiplier, seen);
  }

 private:
  // Magnitudes and signs lie in their places, others around them.
  template <bool kCareful>
  TE_DIST_INLINE uint32_t multiplied(uint32_t moved, uint32_t signs, uint32_t multiplier, Watch& seen) {
    const uint32_t magnitudes = moved & 0x007F007Fu << kUp;
    seen.magnitudes = larger_pairs(seen.magnitudes, magnitudes);
    const uint32_t codes = magnitudes | (signs & kSigns);
    return kCareful ? decode_with_care(codes, multiplier) : multiply_pairs<HalfType::kBFloat16>(codes, multiplier);
  }

  TE_DIST_INLINE uint32_t decode_with_care(uint32_t moved, uint32_t multiplier) {
    const uint32_t value = multiply_pairs<HalfType::kBFloat16>(moved, unscaled().words[0]);
    const uint32_t repaired = pair(repair(moved & 0xFFFFu, value), repair(moved >> 16, value >> 16));
    return multiply_pairs<HalfType::kBFloat16>(repaired, pair(scale(multiplier & 0xFFFFu), scale(multiplier >> 16)));
  }

  TE_DIST_INLINE uint32_t repair(uint32_t moved, uint32_t value) {
    if ((moved & 0x7FFFu) < kSpecial) return value;
    return Code::kSpecial == Code::kCodeMask ? 0x7FFFu : moved | 0x7F80u;
  }

  // The scale alone, from half a multiplier.
  TE_DIST_INLINE uint32_t scale(uint32_t multiplier) {
    const uint32_t exponent = (multiplier >> 7) - kUnbias;
    return exponent == 0 ? 0x0040u : exponent == 255 ? 0x7FFFu : exponent << 7;
  }
};

template <class Code>
struct Decoder<Code, Scaling::kNone, HalfType::kBFloat16> : ByteDecoder<Code> {};
template <class Code>
struct Decoder<Code, Scaling::kPowers, HalfType::kBFloat16> : ByteDecoder<Code> {};

// FP8 to fp16, for codes whose scales are applied to products.
template <class Code>
struct Decoder<Code, Scaling::kNone, HalfType::kFloat16> {
  static constexpr int kBits = 8;
  static constexpr int kDistance = 1;
  static constexpr float kLeftOut = 1.0f;

  TE_DIST_INLINE Multipliers<1> unscaled() { return {}; }

  TE_DIST_INLINE bool needs_care(const Watch&) { return false; }

  template <int kDistance, bool>
  TE_DIST_INLINE void decode(const uint32_t (&codes)[4], const Multipliers<1>&, uint32_t (&values)[kPairs], Watch&) {
    static_assert(kDistance == 1, "nothing is gained by another order");
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if constexpr (Code::kShift == E4M3::kShift) {
        values[i] = halves_of_e4m3(codes[i / 2] >> 16 * (i % 2));
      } else {
        values[i] = __byte_perm(codes[i / 2], 0, i % 2 ? 0x3424 : 0x1404);
      }
    }
  }
};

// Pairs of e2m1 with e4m3 scales. The scale, in the range of the 16-bit type together with what codes lack once they are
// moved, would overflow: values are left smaller by kLeftOut.
template <HalfType kType>
struct Decoder<E2M1, Scaling::kFloats, kType> {
  static constexpr bool kHalf = kType == HalfType::kFloat16;
  static constexpr int kBits = 4;
  static constexpr int kDistance = 4;
  static constexpr float kLeftOut = kHalf ? 128.0f : 16384.0f;
  static constexpr int kDown = kHalf ? 3 : 6;             // from the upper end of a half to exponent and mantissa
  static constexpr float kRaise = kHalf ? 128.0f : 5.192296858534828e33f;  // 2^7 = 2^14 / kLeftOut, 2^112 = 2^126 / kLeftOut

  TE_DIST_INLINE Multipliers<1> of_all(uint32_t byte) {
    const float scale = Float16::value(halves_of_e4m3(byte), 0) * kRaise;
    return {{kHalf ? Float16::store_pair(scale, scale) : BFloat16::store_pair(scale, scale)}};
  }

  TE_DIST_INLINE bool needs_care(const Watch&) { return false; }

  template <int kDistance, bool>
  TE_DIST_INLINE void decode(const uint32_t (&codes)[2], const Multipliers<1>& by, uint32_t (&values)[kPairs], Watch&) {
    static_assert(kDistance == 1 || kDistance == 4, "no other order is at hand");
    constexpr uint32_t kSelect[] = {0x0040, 0x1050, 0x2060, 0x3070};
    constexpr uint32_t kMagnitudes = 0x70007000u >> kDown;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const uint32_t word = codes[i / 4];
      uint32_t magnitudes, signs;
      if constexpr (kDistance == 4) {
        const int up = 12 - i % 4 * 4;  // to the upper ends of both halves
        magnitudes = (up > kDown ? word << (up - kDown) : word >> (kDown - up)) & kMagnitudes;
        signs = word << up & kSigns;
      } else {
        const uint32_t upper = __byte_perm(word, word << 4, kSelect[i % 4]);
        magnitudes = upper >> kDown & kMagnitudes;
        signs = upper & kSigns;
      }
      values[i] = multiply_pairs<kType>(magnitudes | signs, by.words[0]);
    }
  }
};

// Values that are none but their own, rounded to bf16 where fp16 meets scales that only bf16 can hold.
// kSame: the tensor cores multiply this very type; else they multiply bf16.
template <class Element, bool kSame>
struct HalfDecoder {
  static constexpr int kBits = 16;
  static constexpr int kDistance = 1;
  static constexpr float kLeftOut = 1.0f;

  TE_DIST_INLINE Multipliers<1> unscaled() { return {}; }

  TE_DIST_INLINE bool needs_care(const Watch&) { return false; }

  template <int kDistance, bool>
  TE_DIST_INLINE void decode(const uint32_t (&codes)[8], const Multipliers<1>&, uint32_t (&values)[kPairs], Watch&) {
    static_assert(kDistance == 1, "nothing is gained by another order");
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if constexpr (kSame) {
        values[i] = codes[i];
      } else {
        values[i] = BFloat16::store_pair(Element::value(codes[i], 0), Element::value(codes[i], 1));
      }
    }
  }
};
template <>
struct Decoder<BFloat16, Scaling::kNone, HalfType::kBFloat16> : HalfDecoder<BFloat16, true> {};
template <>
struct Decoder<Float16, Scaling::kNone, HalfType::kFloat16> : HalfDecoder<Float16, true> {};
template <>
struct Decoder<Float16, Scaling::kNone, HalfType::kBFloat16> : HalfDecoder<Float16, false> {};

// What is known of an operand when it is compiled. kGrain: summed values of a scale byte. kLoad: bytes that can be read at
// a time.
template <class CodeType, Scaling kScaleBytes, int kGrainOfScales, Along kLines, int kLoadBytes>
struct Source {
  using Code = CodeType;
  static constexpr Scaling kScaling = kScaleBytes;
  static constexpr int kGrain = kGrainOfScales;
  static constexpr bool kTurned = kLines == Along::kKept;
  static constexpr Along kAlong = kLines;
  static constexpr int kLoad = kLoadBytes;
};

// Distance of the order in which the summed values of both operands become pairs: the quickest that both can have. Lines
// of a turned operand take any order.
template <class A, class B, HalfType kType>
__device__ constexpr int distance_of() {
  constexpr int kA = A::kTurned ? 0 : Decoder<typename A::Code, A::kScaling, kType>::kDistance;
  constexpr int kB = B::kTurned ? 0 : Decoder<typename B::Code, B::kScaling, kType>::kDistance;
  return kA == 1 || kB == 1 ? 1 : kA + kB == 0 ? 1 : kA > kB ? kA : kB;
}

}  // namespace te_dist::cuda
