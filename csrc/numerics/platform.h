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

TE_DIST_INLINE uint32_t bits_of(float value) {
#if defined(__CUDACC_RTC__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

TE_DIST_INLINE float float_of(uint32_t bits) {
#if defined(__CUDACC_RTC__)
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

// The smaller of two values, or `limit` where `value` is NaN.
TE_DIST_INLINE float capped(float value, float limit) { return value < limit ? value : limit; }

// Order of magnitudes as integers: bits of |value|, 0 for NaN (a NaN does not enter an amax).
TE_DIST_INLINE uint32_t magnitude_key(float value) {
  const uint32_t magnitude = bits_of(value) & kMagnitudeMask;
  return magnitude > kInfinityBits ? 0u : magnitude;
}

}  // namespace te_dist
