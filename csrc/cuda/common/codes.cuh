// Values to codes by the instructions of the GPU; the same codes as csrc/numerics computes.
#pragma once

#include "../../numerics/scale.h"
#include "types.cuh"

namespace te_dist::cuda {

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

}  // namespace te_dist::cuda
