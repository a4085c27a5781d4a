// Values of codes.
#pragma once

#include "elements.h"

namespace te_dist::cpu::TE_DIST_ISA {

#if defined(__F16C__)

// The lower, or upper, kLanes of fp16 numbers as fp32.
template <int kPart>
TE_DIST_INLINE F32 half_to_float(U16 halves) {
#if defined(__AVX512BW__)
  return reinterpret<F32>(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(reinterpret<__m512i>(halves), kPart)));
#else
  return reinterpret<F32>(_mm256_cvtph_ps(_mm256_extracti128_si256(reinterpret<__m256i>(halves), kPart)));
#endif
}

TE_DIST_INLINE U16 widen_to_words(StepBytes bytes) {
#if defined(__AVX512BW__)
  return reinterpret<U16>(_mm512_cvtepu8_epi16(reinterpret<__m256i>(bytes)));
#else
  return reinterpret<U16>(_mm256_cvtepu8_epi16(reinterpret<__m128i>(bytes)));
#endif
}

// Values of kStep codes, in their order. Every code, shifted, is an fp16 number a power of two away from its value.
template <class Code>
TE_DIST_INLINE Step decode_codes(const uint8_t* codes) {
  constexpr int kShift = 10 - (23 - Code::kShift);
  constexpr float kFactor = float(1u << (15 - Code::kBias));
  const U16 words = widen_to_words(load<StepBytes>(codes));
  const U16 magnitude = words & uint16_t(Code::kCodeMask);
  U16 halves = magnitude << kShift;
  if constexpr (Code::kSpecial == Code::kNan) {  // a type without infinity, whose NaN would become a number
    halves = magnitude == all<U16>(uint16_t(Code::kNan)) ? all<U16>(uint16_t(0x7FFF)) : halves;
  }
  halves |= (words & uint16_t(Code::kSignCode)) << (15 - Code::kMagnitudeBits);
  return {half_to_float<0>(halves) * kFactor, half_to_float<1>(halves) * kFactor};
}

#else

template <class Code>
TE_DIST_INLINE Step decode_codes(const uint8_t* codes) {
  return {Code::decode(widen(load<LaneBytes>(codes))), Code::decode(widen(load<LaneBytes>(codes + kLanes)))};
}

#endif

}  // namespace te_dist::cpu::TE_DIST_ISA
