// Rows of fp32, bf16 or fp16 elements as fp32, and back.
#pragma once

#include "../../numerics/minifloat.h"
#include "../types.h"

namespace te_dist::cpu::TE_DIST_ISA {

// Storage: what lies in memory. Key: magnitudes as integers of the same order, 0 for NaN.

struct Float32 {
  using Storage = float;
  using Key = uint32_t;
  TE_DIST_INLINE Key key(float value) { return magnitude_key(value); }
  TE_DIST_INLINE float magnitude(Key key) { return float_of(key); }
  TE_DIST_INLINE float load(float value) { return value; }
  TE_DIST_INLINE float store(float value) { return value; }
};

struct BFloat16 {
  using Storage = uint16_t;
  using Key = uint16_t;
  TE_DIST_INLINE Key key(uint16_t value) {
    const uint16_t magnitude = value & 0x7FFFu;
    return magnitude > 0x7F80u ? uint16_t(0) : magnitude;
  }
  TE_DIST_INLINE float magnitude(Key key) { return decode_bfloat16(key); }
  TE_DIST_INLINE float load(uint16_t value) { return decode_bfloat16(value); }
  TE_DIST_INLINE uint16_t store(float value) { return encode_bfloat16(value); }
};

struct Float16 {
  using Storage = uint16_t;
  using Key = uint16_t;
  TE_DIST_INLINE Key key(uint16_t value) {
    const uint16_t magnitude = value & 0x7FFFu;
    return magnitude > 0x7C00u ? uint16_t(0) : magnitude;
  }
  TE_DIST_INLINE float magnitude(Key key) { return Half::decode(key); }
  TE_DIST_INLINE float load(uint16_t value) { return Half::decode(value); }
  TE_DIST_INLINE uint16_t store(float value) { return uint16_t(Half::encode(value)); }
};

// Calls `body` with the element type of `dtype`.
template <class Body>
static inline void with_element(DType dtype, const Body& body) {
  if (dtype == DType::kBFloat16) {
    body(BFloat16{});
  } else if (dtype == DType::kFloat16) {
    body(Float16{});
  } else {
    body(Float32{});
  }
}

// Calls `body` with the code type of `fp8`.
template <class Body>
static inline void with_fp8(Fp8 fp8, const Body& body) {
  if (fp8 == Fp8::kE4M3) {
    body(E4M3{});
  } else {
    body(E5M2{});
  }
}

template <class Element>
static void load_row(const typename Element::Storage* __restrict source, int count, float* __restrict values) {
  for (int i = 0; i < count; ++i) values[i] = Element::load(source[i]);
}

}  // namespace te_dist::cpu::TE_DIST_ISA
