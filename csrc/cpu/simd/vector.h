// Vectors of the width this SIMD level has, in the compiler's portable vector types. Intrinsics stand here only, where
// the compiler finds no good instruction by itself.
#pragma once

#include "../../numerics/minifloat.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace te_dist::cpu::TE_DIST_ISA {

#if defined(__AVX512BW__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kLanes = kVectorBytes / 4;  // fp32 values in a vector
constexpr int kStep = 2 * kLanes;         // elements handled at a time: a vector of 16-bit values

template <class T, int kBytes>
struct VectorType {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <class T, int kBytes>
using VectorOf = typename VectorType<T, kBytes>::type;

using F32 = VectorOf<float, kVectorBytes>;
using U32 = VectorOf<uint32_t, kVectorBytes>;
using U16 = VectorOf<uint16_t, kVectorBytes>;
using HalfU16 = VectorOf<uint16_t, kVectorBytes / 2>;   // kLanes of them
using StepBytes = VectorOf<uint8_t, kVectorBytes / 2>;  // kStep of them
using LaneBytes = VectorOf<uint8_t, kVectorBytes / 4>;  // kLanes of them

}  // namespace te_dist::cpu::TE_DIST_ISA

namespace te_dist {

template <>
struct LanesOf<cpu::TE_DIST_ISA::F32> {
  using Floats = cpu::TE_DIST_ISA::F32;
  using Integers = cpu::TE_DIST_ISA::U32;

  TE_DIST_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512BW__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    Floats result;
    for (int i = 0; i < cpu::TE_DIST_ISA::kLanes; ++i) result[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return result;
#endif
  }
};
template <>
struct LanesOf<cpu::TE_DIST_ISA::U32> {
  using Floats = cpu::TE_DIST_ISA::F32;
};

}  // namespace te_dist

namespace te_dist::cpu::TE_DIST_ISA {

template <class Vector>
TE_DIST_INLINE Vector load(const void* source) {
  Vector vector;
  __builtin_memcpy(&vector, source, sizeof vector);
  return vector;
}

template <class Vector>
TE_DIST_INLINE void store(void* target, Vector vector) {
  __builtin_memcpy(target, &vector, sizeof vector);
}

template <class To, class From>
TE_DIST_INLINE To convert(From vector) {
  return __builtin_convertvector(vector, To);
}

template <class To, class From>
TE_DIST_INLINE To reinterpret(From vector) {
  static_assert(sizeof(To) == sizeof(From), "only vectors of equal size hold the same bits");
  To result;
  __builtin_memcpy(&result, &vector, sizeof result);
  return result;
}

// Bytes of 16-bit lanes that are below 256.
TE_DIST_INLINE StepBytes narrow(U16 words) {
#if defined(__AVX512BW__)
  return reinterpret<StepBytes>(_mm512_cvtepi16_epi8(reinterpret<__m512i>(words)));
#elif defined(__AVX2__)
  const __m256i v = reinterpret<__m256i>(words);
  return reinterpret<StepBytes>(_mm_packus_epi16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
#elif defined(__SSE2__)
  const __m128i v = reinterpret<__m128i>(words);
  const long long low = _mm_cvtsi128_si64(_mm_packus_epi16(v, v));
  return load<StepBytes>(&low);
#else
  return convert<StepBytes>(words);
#endif
}

// Bytes of two vectors of lanes that are below 256, in order.
TE_DIST_INLINE StepBytes narrow(U32 first, U32 second) {
#if defined(__AVX512BW__)
  const __m256i low = _mm512_cvtepi32_epi16(reinterpret<__m512i>(first));
  const __m256i high = _mm512_cvtepi32_epi16(reinterpret<__m512i>(second));
  return narrow(reinterpret<U16>(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)));
#elif defined(__AVX2__)
  const __m256i words = _mm256_packus_epi32(reinterpret<__m256i>(first), reinterpret<__m256i>(second));
  return narrow(reinterpret<U16>(_mm256_permute4x64_epi64(words, 0xD8)));
#elif defined(__SSE2__)
  return narrow(reinterpret<U16>(_mm_packs_epi32(reinterpret<__m128i>(first), reinterpret<__m128i>(second))));
#else
  StepBytes bytes;
  for (int i = 0; i < kLanes; ++i) {
    bytes[i] = uint8_t(first[i]);
    bytes[kLanes + i] = uint8_t(second[i]);
  }
  return bytes;
#endif
}

TE_DIST_INLINE U32 widen(LaneBytes bytes) {
#if defined(__AVX512BW__)
  return reinterpret<U32>(_mm512_cvtepu8_epi32(reinterpret<__m128i>(bytes)));
#elif defined(__AVX2__)
  long long raw;
  store(&raw, bytes);
  return reinterpret<U32>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(raw)));
#else
  return convert<U32>(bytes);
#endif
}

TE_DIST_INLINE U32 widen(HalfU16 words) {
#if defined(__AVX512BW__)
  return reinterpret<U32>(_mm512_cvtepu16_epi32(reinterpret<__m256i>(words)));
#elif defined(__AVX2__)
  return reinterpret<U32>(_mm256_cvtepu16_epi32(reinterpret<__m128i>(words)));
#else
  return convert<U32>(words);
#endif
}

// The low halves of lanes.
TE_DIST_INLINE HalfU16 low_halves(U32 lanes) {
#if defined(__AVX512BW__)
  return reinterpret<HalfU16>(_mm512_cvtepi32_epi16(reinterpret<__m512i>(lanes)));
#elif defined(__AVX2__)
  const __m256i words = _mm256_packus_epi32(_mm256_and_si256(reinterpret<__m256i>(lanes), _mm256_set1_epi32(0xFFFF)),
                                            _mm256_setzero_si256());
  return reinterpret<HalfU16>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0xD8)));
#else
  return convert<HalfU16>(lanes);
#endif
}

// Even lanes from the low halves of `even`, odd lanes from those of `odd`.
TE_DIST_INLINE U16 interleave(U32 even, U32 odd) {
#if defined(__AVX512BW__)
  const __m512i shifted = _mm512_slli_epi32(reinterpret<__m512i>(odd), 16);
  return reinterpret<U16>(_mm512_mask_mov_epi16(reinterpret<__m512i>(even), 0xAAAAAAAAu, shifted));
#else
  return reinterpret<U16>((even & 0xFFFFu) | odd << 16);
#endif
}

// Past the caches, for outputs that are not read again soon: `target` must be aligned to the vector's size.
template <class Vector>
TE_DIST_INLINE void stream(void* target, Vector vector) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(Vector) == 64) return _mm512_stream_si512((__m512i*)target, reinterpret<__m512i>(vector));
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(Vector) == 32) return _mm256_stream_si256((__m256i*)target, reinterpret<__m256i>(vector));
#endif
#if defined(__SSE2__)
  if constexpr (sizeof(Vector) == 16) return _mm_stream_si128((__m128i*)target, reinterpret<__m128i>(vector));
#endif
  store(target, vector);
}

// Orders streamed stores before what other threads read; at the end of a thread's work.
TE_DIST_INLINE void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Whether a lane is not zero.
template <class Vector>
TE_DIST_INLINE bool any(Vector v) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(Vector) == 64) return _mm512_test_epi64_mask(reinterpret<__m512i>(v), reinterpret<__m512i>(v));
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(Vector) == 32) return !_mm256_testz_si256(reinterpret<__m256i>(v), reinterpret<__m256i>(v));
#endif
  const auto words = reinterpret<VectorOf<uint64_t, sizeof(Vector)>>(v);
  uint64_t joined = 0;
  for (size_t i = 0; i < sizeof(Vector) / 8; ++i) joined |= words[i];
  return joined != 0;
}

// a - b, or 0 where that would be negative.
TE_DIST_INLINE U16 subtract_saturating(U16 a, U16 b) {
#if defined(__AVX512BW__)
  return reinterpret<U16>(_mm512_subs_epu16(reinterpret<__m512i>(a), reinterpret<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret<U16>(_mm256_subs_epu16(reinterpret<__m256i>(a), reinterpret<__m256i>(b)));
#else
  return a > b ? a - b : U16{};
#endif
}

// Largest of 8 unsigned 16-bit, or 4 unsigned 32-bit, integers.
TE_DIST_INLINE uint32_t largest_of_16_bytes(VectorOf<uint32_t, 16> v) {
  const uint32_t a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}

TE_DIST_INLINE uint32_t largest_of_16_bytes(VectorOf<uint16_t, 16> v) {
#if defined(__AVX2__)
  const __m128i inverted = _mm_xor_si128(reinterpret<__m128i>(v), _mm_set1_epi16(-1));
  return 0xFFFFu ^ (uint32_t(_mm_cvtsi128_si32(_mm_minpos_epu16(inverted))) & 0xFFFFu);
#else
  uint32_t largest = 0;
  for (int i = 0; i < 8; ++i) largest = largest > v[i] ? largest : v[i];
  return largest;
#endif
}

// Largest of the unsigned integers T in a vector of kBytes.
template <class T, int kBytes>
TE_DIST_INLINE uint32_t largest_lane(VectorOf<T, kBytes> v) {
  if constexpr (kBytes == 16) {
    return largest_of_16_bytes(v);
  } else {
    using Half = VectorOf<T, kBytes / 2>;
    struct Halves {
      Half low, high;
    };
    const Halves halves = reinterpret<Halves>(v);
    return largest_lane<T, kBytes / 2>(larger(halves.low, halves.high));
  }
}

}  // namespace te_dist::cpu::TE_DIST_ISA
