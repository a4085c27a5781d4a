// What Adam keeps in fewer bytes than fp32, and how it is rounded. Random numbers follow from a seed, the parameter, the
// step and the place of an element in the whole parameter: they are the same on every device and for every way to cut it.
#pragma once

#include "adam.h"
#include "minifloat.h"
#include "philox.h"

namespace te_dist {

// Consecutive values of a row whose fp8 moments share a scale. A cut between rows does not go through them.
constexpr int kMomentBlock = 128;
constexpr float kLargestMoment = 448.0f;        // of e4m3
constexpr float kSmallestMoment = 7.70371978e-34f;  // 2^-110; what is smaller counts as nothing

// Which random numbers belong to the elements of a tensor.
struct AdamNoise {
  uint64_t seed;
  uint64_t number;  // of the parameter
  uint64_t origin;  // place of the first element in the whole
  uint64_t width;   // elements of a row of this part
  uint64_t pitch;   // and of the whole
};

// Place in the whole of an element of this part.
TE_DIST_INLINE uint64_t place_in_whole(const AdamNoise& noise, uint64_t index) {
  if (noise.width == noise.pitch) return noise.origin + index;
  return noise.origin + index / noise.width * noise.pitch + index % noise.width;
}

// What the random words of the four elements from place 4 * `quad` on are drawn from, for one step.
TE_DIST_INLINE PhiloxBlock adam_counter(const AdamNoise& noise, uint32_t step, uint64_t quad) {
  return {{uint32_t(quad), uint32_t(quad >> 32), step, uint32_t(noise.number)}};
}

TE_DIST_INLINE PhiloxBlock adam_noise(const AdamNoise& noise, uint32_t step, uint64_t quad) {
  PhiloxBlock block[1] = {adam_counter(noise, step, quad)};
  philox_rounds<1>(noise.seed, block);
  return block[0];
}

// 16 bits each of the random word of an element: for the first moment, the second one, and the value.
TE_DIST_INLINE uint32_t first_noise(uint32_t word) { return word & 0xFFFFu; }
TE_DIST_INLINE uint32_t second_noise(uint32_t word) { return word >> 16; }
TE_DIST_INLINE uint32_t value_noise(uint32_t word) { return (word * 0x9E3779B1u) >> 16; }

TE_DIST_INLINE bool is_nan_bits(uint32_t bits) { return (bits & kMagnitudeMask) > kInfinityBits; }

// Code of a bf16 value: up with a probability of the distance from the value below, in steps of 2^-16. `noise`: 16 bits.
TE_DIST_INLINE uint32_t encode_bfloat16_stochastic(float value, uint32_t noise) {
  const uint32_t bits = bits_of(value);
  return is_nan_bits(bits) ? 0x7FFFu : (bits + noise) >> 16;
}

// Saturating code of e4m3, rounded in the same way.
TE_DIST_INLINE uint32_t encode_e4m3_stochastic(float value, uint32_t noise) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = smaller(bits & kMagnitudeMask, E4M3::kClamp);
  const uint32_t normal = ((magnitude + (noise << 4)) >> 20) - ((127u - E4M3::kBias) << 3);
  const uint32_t subnormal = uint32_t(float_of(magnitude) * 512.0f + float(noise) * 0x1p-16f);
  const uint32_t code = magnitude < E4M3::kMinNormalBits ? subnormal : normal;
  return is_nan_bits(bits) ? E4M3::kNan : code | (bits >> 24 & E4M3::kSignCode);
}

// A number as a bf16 code, to nearest and away from zero where two are as near, and 16 bits of what is missing.
struct SplitFloat {
  uint32_t high;
  uint32_t low;
};

// A NaN stays one; its payload is not kept.
TE_DIST_INLINE SplitFloat split_float(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t high = (bits + 0x8000u) >> 16;
  if (is_nan_bits(bits)) return {0x7FFFu, 0u};
  return {high, (bits - (high << 16)) & 0xFFFFu};
}

TE_DIST_INLINE float join_float(uint32_t high, uint32_t low) {
  return float_of((high << 16) + low - (low & 0x8000u ? 0x10000u : 0u));
}

// Of a block: what codes are multiplied by, and what values are.
struct MomentScale {
  float scale;
  float inverse;
};

TE_DIST_INLINE MomentScale moment_scale(float amax) {
  if (!(amax >= kSmallestMoment)) return {0.0f, 0.0f};
  return {amax / kLargestMoment, kLargestMoment / amax};
}

// Of a root of the second moment, which is kept in its place: one that is not 0 does not become 0, as steps are divided
// by it.
TE_DIST_INLINE uint32_t encode_root(float root, float inverse, uint32_t noise) {
  const uint32_t code = encode_e4m3_stochastic(root * inverse, noise);
  return code == 0u && root > 0.0f && inverse > 0.0f ? 1u : code;
}

}  // namespace te_dist
