// What g++ and NVRTC spell differently. Everything else under csrc/numerics is the same source for both.
#pragma once

#if defined(__CUDACC_RTC__)
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef int int32_t;
#define TE_DIST_INLINE static __device__ __forceinline__
#else
#include <cstdint>
// NOTE: `static`, so that no copy compiled for a newer CPU can be chosen by the linker for an older one.
#define TE_DIST_INLINE static inline __attribute__((always_inline))
#endif

namespace te_dist {

constexpr uint32_t kInfinityBits = 0x7F800000u;
constexpr uint32_t kMagnitudeMask = 0x7FFFFFFFu;
constexpr float kFloatMax = 3.402823466e+38f;

// What the numerics compute on: a float, or a vector of floats, with integers of the same shape. Every function below
// is free of branches and written once for both; csrc/cpu adds the vectors.
template <class Values>
struct LanesOf;
template <>
struct LanesOf<float> {
  using Integers = uint32_t;
#if defined(__CUDACC_RTC__)
  TE_DIST_INLINE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
#else
  TE_DIST_INLINE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#endif
};
template <>
struct LanesOf<uint32_t> {
  using Floats = float;
};
template <class Values>
using IntegersOf = typename LanesOf<Values>::Integers;
template <class Values>
using FloatsOf = typename LanesOf<Values>::Floats;

template <class Floats>
TE_DIST_INLINE IntegersOf<Floats> bits_of(Floats value) {
#if defined(__CUDACC_RTC__)
  return __float_as_uint(value);
#else
  IntegersOf<Floats> bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

template <class Integers>
TE_DIST_INLINE FloatsOf<Integers> float_of(Integers bits) {
#if defined(__CUDACC_RTC__)
  return __uint_as_float(bits);
#else
  FloatsOf<Integers> value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

// `value` in every lane.
template <class Lanes, class Scalar>
TE_DIST_INLINE Lanes all(Scalar value) {
  return Lanes{} + value;
}

template <class Lanes>
TE_DIST_INLINE Lanes smaller(Lanes a, Lanes b) {
  return a < b ? a : b;
}

template <class Lanes>
TE_DIST_INLINE Lanes larger(Lanes a, Lanes b) {
  return a > b ? a : b;
}

// The smaller of two values, or `limit` where `value` is NaN.
template <class Floats>
TE_DIST_INLINE Floats capped(Floats value, float limit) {
  const Floats limits = all<Floats>(limit);
  return value < limits ? value : limits;
}

// The larger of two values; NaN stays.
template <class Floats>
TE_DIST_INLINE Floats at_least(Floats value, float limit) {
#if defined(__CUDACC_RTC__)
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(value), "f"(limit));
  return result;
#else
  const Floats limits = all<Floats>(limit);
  return value < limits ? limits : value;
#endif
}

// a * b + c, rounded once: the only contraction there is.
template <class Floats>
TE_DIST_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return LanesOf<Floats>::multiply_add(a, b, c);
}

// 1 / value, to nearest even, for values from 1 to 2.
template <class Floats>
TE_DIST_INLINE Floats reciprocal_below_one(Floats value) {
#if defined(__CUDACC_RTC__)
  // Without the branch of a division, which keeps loads from being issued early.
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(value));
  return __fmaf_rn(guess, __fmaf_rn(-value, guess, 1.0f), guess);
#else
  return 1.0f / value;
#endif
}

TE_DIST_INLINE float square_root(float value) {
#if defined(__CUDACC_RTC__)
  return __fsqrt_rn(value);
#else
  return __builtin_sqrtf(value);
#endif
}

template <class Floats>
TE_DIST_INLINE Floats magnitude(Floats value) {
  return float_of(bits_of(value) & kMagnitudeMask);
}

// Order of magnitudes as integers: bits of |value|, 0 for NaN (a NaN does not enter an amax).
template <class Integers>
TE_DIST_INLINE Integers magnitude_key(Integers bits) {
  const Integers key = bits & kMagnitudeMask;
  return key > all<Integers>(kInfinityBits) ? Integers{} : key;
}

}  // namespace te_dist
