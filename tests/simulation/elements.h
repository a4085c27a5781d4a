// Types of elements: their codes and values.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "device.h"

namespace sim {

inline float from_bits(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t bits(float value) { return std::bit_cast<uint32_t>(value); }
inline bool is_nan(float value) { return value != value; }

template <int kExponent, int kMantissa, bool kHasInfinity>
float decode(uint32_t code) {
  const int bias = (1 << (kExponent - 1)) - 1, top = (1 << kExponent) - 1;
  const int exponent = int(code >> kMantissa) & top;
  const int mantissa = int(code & ((1u << kMantissa) - 1));
  const float sign = code >> (kExponent + kMantissa) & 1 ? -1.0f : 1.0f;
  const bool is_special = kHasInfinity ? exponent == top : exponent == top && mantissa == (1 << kMantissa) - 1;
  if (is_special) return kHasInfinity && mantissa == 0 ? sign * HUGE_VALF : NAN;
  const int whole = exponent ? mantissa + (1 << kMantissa) : mantissa;
  return sign * std::ldexp(float(whole), std::max(exponent, 1) - bias - kMantissa);
}

// The values of all codes.
template <int kExponent, int kMantissa, bool kHasInfinity>
auto decoded() {
  std::array<float, 2 << (kExponent + kMantissa)> values;
  for (size_t i = 0; i < values.size(); ++i) values[i] = decode<kExponent, kMantissa, kHasInfinity>(unsigned(i));
  return values;
}

inline uint16_t word_at(const uint8_t* place) { return uint16_t(place[0] | place[1] << 8); }

struct e4m3 {
  static constexpr int kBytes = 1, kLargest = 0x7E;
  inline static const auto values = decoded<4, 3, false>();
  static float value(const uint8_t* place) { return values[*place]; }
};
struct e5m2 {
  static constexpr int kBytes = 1, kLargest = 0x7B;
  inline static const auto values = decoded<5, 2, true>();
  static float value(const uint8_t* place) { return values[*place]; }
};
struct bf16 {
  static constexpr int kBytes = 2;
  static float value(const uint8_t* place) { return from_bits(uint32_t(word_at(place)) << 16); }
  static uint16_t code(float value) {
    if (is_nan(value)) return 0x7FFF;
    return uint16_t((bits(value) + 0x7FFF + (bits(value) >> 16 & 1)) >> 16);
  }
};
struct f16 {
  static constexpr int kBytes = 2;
  inline static const auto values = decoded<5, 10, true>();
  static float value(const uint8_t* place) { return values[word_at(place)]; }
  static uint16_t code(float value) { return is_nan(value) ? 0x7FFF : std::bit_cast<uint16_t>(_Float16(value)); }
};

// The code of an FP8 type that is nearest to a value, the even one of two; what is too large becomes the largest, every
// NaN the same.
template <class Type>
uint8_t nearest(float value) {
  if (is_nan(value)) return 0x7F;
  const float* const values = Type::values.data();
  const float magnitude = std::min(std::fabs(value), values[Type::kLargest]);
  int code = int(std::lower_bound(values, values + Type::kLargest, magnitude) - values);
  if (code > 0) {
    const float above = values[code] - magnitude, below = magnitude - values[code - 1];
    if (below < above || (below == above && code % 2 == 1)) --code;
  }
  return uint8_t((bits(value) >> 24 & 0x80) | unsigned(code));
}

}  // namespace sim
