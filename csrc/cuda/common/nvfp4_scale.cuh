// NVFP4: from amaxes to scale bytes and multipliers.
#pragma once

#include "codes.cuh"

namespace te_dist::cuda {

// A tile's scale byte and the multiplier of its elements.
struct Scale {
  uint32_t code;
  float multiplier;
};

// From a tensor amax to scales.
struct TensorScale {
  float amax, scale, inverse;

  TE_DIST_INLINE TensorScale of(float amax, float e4m3_max) {
    const float scale = nvfp4_tensor_scale(amax, e4m3_max);
    return {amax, scale, 1.0f / scale};
  }

  TE_DIST_DEVICE float scaled(float block_amax) const {
    return fminf(block_amax * (scale * float_of(kReciprocalOf6)), kFloatMax);
  }

  TE_DIST_DEVICE uint32_t code(float block_amax) const { return encode_pair<E4M3>(scaled(block_amax), 0.0f); }

  // What codes of a tile stand for, without the amax of the tensor; its reciprocal is the multiplier.
  TE_DIST_DEVICE float unit(uint32_t code) const { return decode_pair<E4M3>(code).x * inverse; }
  // Whether it and its reciprocal are normal numbers, or it is zero, whatever the code.
  TE_DIST_DEVICE bool is_ordinary() const { return inverse > 0x1p-100f && inverse < 0x1p100f; }
};

// As nvfp4_block_multiplier.
template <int kCount>
TE_DIST_INLINE void find_multipliers(const float (&units)[kCount], bool is_ordinary, Scale (&scales)[kCount]) {
  float inverses[kCount];
  if (__builtin_expect(is_ordinary, 1)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) inverses[i] = reciprocal(units[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) inverses[i] = 1.0f / units[i];
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) scales[i].multiplier = fminf(inverses[i], kFloatMax);
}

}  // namespace te_dist::cuda
