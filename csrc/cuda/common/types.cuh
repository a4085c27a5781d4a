// Plain descriptions of the memory a kernel reads and writes, and the element types in it.
#pragma once

#include "../../numerics/minifloat.h"

typedef long long int64_t;

#define TE_DIST_DEVICE __device__ __forceinline__

namespace te_dist::cuda {

// A 2-D strided view in logical (row, col) order; strides in elements.
template <class T>
struct Plane {
  T* data;
  int64_t row_stride;
  int64_t col_stride;

  TE_DIST_DEVICE T& at(int64_t row, int64_t col) const { return data[row * row_stride + col * col_stride]; }
};

// Extents of a matrix.
struct Extents {
  int64_t rows;
  int64_t cols;
};

// (row, col) offset of a matrix's first element inside its tile, below the extents of the tile.
struct Phase {
  int64_t row;
  int64_t col;
};

// One direction of a block format. `amax` (on the tile grid) replaces what the kernel would find where it is not null.
template <class Scale>
struct BlockOutput {
  Plane<const float> amax;
  uint8_t* data;
  Plane<Scale> scale;
};

// What shares a scale in one direction of a block format; kAbsent: the direction is not written.
enum class Share { kAbsent, kRun, kSquare, kTensor };

// Elements lie in 32-bit words, one or two in each. Words of magnitudes are compared without a look at their types: the
// larger of two words holds the larger magnitude in each half, and a NaN is smaller than everything; for `*_or_nan` it is
// larger, and signs mean nothing.

TE_DIST_INLINE float larger_or_nan(float a, float b) {
  float result;
  asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Two 16-bit elements, of which those that are not a number become infinity.
TE_DIST_INLINE uint32_t halves_without_nan(uint32_t word, uint32_t infinity) {
  const uint32_t low = (word & 0x7FFFu) > infinity ? infinity : word & 0xFFFFu;
  const uint32_t high = (word >> 16 & 0x7FFFu) > infinity ? infinity : word >> 16;
  return low | high << 16;
}

struct Float32 {
  static constexpr int kBytes = 4;
  static constexpr int kPerWord = 1;
  static constexpr float kMaxFinite = kFloatMax;
  static constexpr bool kIsTopHalf = false;  // whether an element is the upper half of the fp32 number it is

  TE_DIST_INLINE float value(uint32_t word, int) { return float_of(word); }
  TE_DIST_INLINE uint32_t raise(uint32_t magnitudes, uint32_t word) {
    return bits_of(fmaxf(float_of(magnitudes), fabsf(float_of(word))));
  }
  TE_DIST_INLINE float largest(uint32_t magnitudes) { return float_of(magnitudes); }
  TE_DIST_INLINE uint32_t raise_or_nan(uint32_t magnitudes, uint32_t word) {
    return bits_of(larger_or_nan(float_of(magnitudes), float_of(word)));
  }
  TE_DIST_INLINE float largest_or_nan(uint32_t magnitudes) { return float_of(magnitudes); }
  TE_DIST_INLINE uint32_t without_nan(uint32_t word) {
    return (word & kMagnitudeMask) > kInfinityBits ? kInfinityBits : word;
  }
  TE_DIST_INLINE uint32_t store(float value) { return bits_of(value); }
};

struct BFloat16 {
  static constexpr int kBytes = 2;
  static constexpr int kPerWord = 2;
  static constexpr float kMaxFinite = 3.38953139e38f;
  static constexpr bool kIsTopHalf = true;

  TE_DIST_INLINE float value(uint32_t word, int half) { return float_of(half ? word & 0xFFFF0000u : word << 16); }
  TE_DIST_INLINE uint32_t raise(uint32_t magnitudes, uint32_t word) {
    uint32_t result;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(magnitudes), "r"(word & 0x7FFF7FFFu));
    return result;
  }
  TE_DIST_INLINE float largest(uint32_t magnitudes) { return fmaxf(value(magnitudes, 0), value(magnitudes, 1)); }
  TE_DIST_INLINE uint32_t raise_or_nan(uint32_t magnitudes, uint32_t word) {
    uint32_t result;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(magnitudes), "r"(word));
    return result;
  }
  TE_DIST_INLINE float largest_or_nan(uint32_t magnitudes) {
    return larger_or_nan(value(magnitudes, 0), value(magnitudes, 1));
  }
  TE_DIST_INLINE uint32_t without_nan(uint32_t word) { return halves_without_nan(word, 0x7F80u); }
  TE_DIST_INLINE uint32_t store(float value) {
    uint16_t code;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(code) : "f"(value));
    return code;
  }
  TE_DIST_INLINE uint32_t store_pair(float first, float second) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
  }
};

struct Float16 {
  static constexpr int kBytes = 2;
  static constexpr int kPerWord = 2;
  static constexpr float kMaxFinite = 65504.0f;
  static constexpr bool kIsTopHalf = false;

  TE_DIST_INLINE float value(uint32_t word, int half) {
    const uint16_t code = uint16_t(half ? word >> 16 : word);
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(code));
    return result;
  }
  TE_DIST_INLINE uint32_t raise(uint32_t magnitudes, uint32_t word) {
    uint32_t result;
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(magnitudes), "r"(word & 0x7FFF7FFFu));
    return result;
  }
  TE_DIST_INLINE float largest(uint32_t magnitudes) { return fmaxf(value(magnitudes, 0), value(magnitudes, 1)); }
  TE_DIST_INLINE uint32_t raise_or_nan(uint32_t magnitudes, uint32_t word) {
    uint32_t result;
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(result) : "r"(magnitudes), "r"(word));
    return result;
  }
  TE_DIST_INLINE float largest_or_nan(uint32_t magnitudes) {
    return larger_or_nan(value(magnitudes, 0), value(magnitudes, 1));
  }
  TE_DIST_INLINE uint32_t without_nan(uint32_t word) { return halves_without_nan(word, 0x7C00u); }
  TE_DIST_INLINE uint32_t store(float value) {
    uint16_t code;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(code) : "f"(value));
    return code;
  }
  TE_DIST_INLINE uint32_t store_pair(float first, float second) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
  }
};

}  // namespace te_dist::cuda
