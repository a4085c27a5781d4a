// Values to codes by the instructions of the GPU; the same codes as csrc/numerics computes.
#pragma once

#include "../../numerics/scale.h"
#include "types.cuh"

namespace te_dist::cuda {

// As 1 / value rounds where value and result are normal numbers; NaN for zero. Without the branch for the others.
TE_DIST_INLINE float reciprocal(float value) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(value));
  return __fmaf_rn(guess, __fmaf_rn(-value, guess, 1.0f), guess);
}

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

// Codes of eight values times their multipliers, the first in the lowest byte.
template <class Code>
TE_DIST_INLINE void encode_eight(const float (&values)[8], const float (&multipliers)[8], uint32_t (&codes)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int j = 4 * h;
    codes[h] = encode_four<Code>(values[j] * multipliers[j], values[j + 1] * multipliers[j + 1],
                                 values[j + 2] * multipliers[j + 2], values[j + 3] * multipliers[j + 3]);
  }
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

// Magnitudes of e2m1 codes are 2 a, a + 2 and a / 2 + 4, whichever is the smallest, and at most 7. Each is rounded in one
// step, to nearest even or toward zero, by adding it to a number from 2^23 to 2^24, whose last place is 1. Results are the
// bits of that number and the code. The second of eight codes takes another number than the rest: shifted into their
// nibbles and added up, all but the codes vanishes, modulo 2^32.
struct CodeBase {
  TE_DIST_INLINE float of(int index) { return index == 1 ? 13631488.0f : 8388608.0f; }  // 0x4B500000, 0x4B000000
};

// (a - 4) / 2 inside [0, 1]: exact where it is not cut off, halves of [4, 8] being at most twice as large as 2.
TE_DIST_INLINE float top_of_e2m1(float size) {
  float top;
  asm("fma.rn.sat.f32 %0, %1, 0f3F000000, 0fC0000000;" : "=f"(top) : "f"(size));
  return top;
}

TE_DIST_INLINE uint32_t smallest_code(float a, float b, float c) {
  return uint32_t(__vimin3_s32(int(bits_of(a)), int(bits_of(b)), int(bits_of(c))));
}

// Code number `index` of eight: of a magnitude, not NaN, to nearest even. kBelow7: it is smaller than 7.
template <bool kBelow7>
TE_DIST_INLINE uint32_t round_e2m1(float size, int index) {
  const float base = CodeBase::of(index);
  const float top = kBelow7 ? __fmaf_rn(size, 0.5f, base + 4.0f) : __fadd_rn(top_of_e2m1(size), base + 6.0f);
  return smallest_code(__fmaf_rn(size, 2.0f, base), __fadd_rn(size, base + 2.0f), top);
}

// Two magnitudes, in halves of a word: code number and 9 bits behind its point, rounded toward zero. 2^-14 of a magnitude is
// that as fp16 has it, whose steps double from 2^-13 on, as those of e2m1 do from 2 on. What a sum with a random number
// rounds up to 0.5 in fp32 must not be lost: it is less than 2^-26 below.
TE_DIST_INLINE uint32_t places_in_e2m1(float low, float high) {
  uint32_t places;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;"
      : "=r"(places)
      : "f"(__fmaf_rz(high, 0x1p-14f, 0x1p-40f)), "f"(__fmaf_rz(low, 0x1p-14f, 0x1p-40f)));
  return places;
}

// The same as encode_e2m1_stochastic of csrc/numerics rounds: the codes in bits 9 to 11 of each half. `noise`: twice the
// random bytes, in halves.
TE_DIST_INLINE uint32_t round_e2m1_noisy(uint32_t places, uint32_t noise) {
  return __viaddmin_u16x2(places, noise, 0x0FFF0FFFu);
}

// A factor that the compiler does not know: it would shift instead, by the units that have more to do.
__constant__ uint32_t kOneNibble = 16;

// Adds rounded codes, handed in from the last of eight to the first, to the nibbles of a word.
TE_DIST_INLINE void push_code(uint32_t& word, uint32_t rounded) { word = word * kOneNibble + rounded; }

}  // namespace te_dist::cuda
