// Elements of fp32, bf16 or fp16 matrices: a step of them as two vectors of fp32, their magnitudes as integers, and
// back.
#pragma once

#include "../types.h"
#include "vector.h"

namespace te_dist::cpu::TE_DIST_ISA {

// Two vectors of fp32. The order of a step's elements in them is the element type's own: `interleaved` says that `a`
// holds the even and `b` the odd ones, which costs no shuffle for 16-bit elements.
struct Step {
  F32 a, b;
};

// Storage: what lies in memory. Key: magnitudes as integers of the same order. Keys from `kNotFinite` on are infinity
// (that value) and NaN.

struct Float32 {
  using Storage = float;
  using Key = uint32_t;
  static constexpr bool interleaved = false;
  static constexpr Key kNotFinite = kInfinityBits;

  TE_DIST_INLINE float magnitude_of(Key key) { return float_of(key); }
  TE_DIST_INLINE F32 load_lanes(const float* source) { return load<F32>(source); }
  TE_DIST_INLINE void store_lanes(float* target, F32 values) { store(target, values); }
  TE_DIST_INLINE Step load_step(const float* source) { return {load<F32>(source), load<F32>(source + kLanes)}; }
};

struct BFloat16 {
  using Storage = uint16_t;
  using Key = uint16_t;
  static constexpr bool interleaved = true;
  static constexpr Key kNotFinite = 0x7F80u;

  TE_DIST_INLINE float magnitude_of(Key key) { return decode_bfloat16(uint32_t(key)); }
  TE_DIST_INLINE F32 load_lanes(const uint16_t* source) { return decode_bfloat16(widen(load<HalfU16>(source))); }
  TE_DIST_INLINE void store_lanes(uint16_t* target, F32 values) { store(target, low_halves(encode_bfloat16(values))); }
  TE_DIST_INLINE Step load_step(const uint16_t* source) {
    const U32 pairs = load<U32>(source);
    return {float_of(pairs << 16), float_of(pairs & 0xFFFF0000u)};
  }
};

struct Float16 {
  using Storage = uint16_t;
  using Key = uint16_t;
  static constexpr bool interleaved = false;
  static constexpr Key kNotFinite = 0x7C00u;

  TE_DIST_INLINE float magnitude_of(Key key) { return Half::decode(uint32_t(key)); }
  TE_DIST_INLINE F32 load_lanes(const uint16_t* source) {
#if defined(__AVX512BW__)
    return reinterpret<F32>(_mm512_cvtph_ps(load<__m256i>(source)));
#elif defined(__F16C__)
    return reinterpret<F32>(_mm256_cvtph_ps(load<__m128i>(source)));
#else
    return Half::decode(widen(load<HalfU16>(source)));
#endif
  }
  TE_DIST_INLINE void store_lanes(uint16_t* target, F32 values) { store(target, low_halves(Half::encode(values))); }
  TE_DIST_INLINE Step load_step(const uint16_t* source) { return {load_lanes(source), load_lanes(source + kLanes)}; }
};

// Codes of a step, below 256, in the order of the elements.
template <class Element>
TE_DIST_INLINE StepBytes codes_in_order(U32 a, U32 b) {
  if constexpr (Element::interleaved) return narrow(interleave(a, b));
  return narrow(a, b);
}

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

}  // namespace te_dist::cpu::TE_DIST_ISA
