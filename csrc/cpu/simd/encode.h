// Amaxes and codes of rows of elements.
#pragma once

#include "elements.h"

namespace te_dist::cpu::TE_DIST_ISA {

// Multipliers of a row of elements: one for all, or one for each, in the order in which `load_step` delivers elements.
struct OneMultiplier {
  F32 value;
  explicit OneMultiplier(float scalar) : value(all<F32>(scalar)) {}
  F32 at(int) const { return value; }
};

struct LaneMultipliers {
  const float* values;
  F32 at(int lane) const { return load<F32>(values + lane); }
};

// From the order of elements to that of `load_step`; `count` is a multiple of kStep.
template <class Element>
static inline void order_as_steps(float* multipliers, int count) {
  if constexpr (Element::interleaved) {
    for (int first = 0; first < count; first += kStep) {
      float step[kStep];
      __builtin_memcpy(step, multipliers + first, sizeof step);
      for (int i = 0; i < kLanes; ++i) {
        multipliers[first + i] = step[2 * i];
        multipliers[first + kLanes + i] = step[2 * i + 1];
      }
    }
  }
}

// Largest key among `kCount` elements, NaN included (as keys above kNotFinite).
template <class Element, int kCount>
TE_DIST_INLINE uint32_t largest_key(const typename Element::Storage* source) {
  using Key = typename Element::Key;
  constexpr int kRunBytes = kCount * int(sizeof(Key));
  constexpr int kBytes = kRunBytes < kVectorBytes ? kRunBytes : kVectorBytes;
  using Keys = VectorOf<Key, kBytes>;
  constexpr Key kMask = Key(Key(-1) >> 1);
  Keys keys = load<Keys>(source) & kMask;
  for (int i = kBytes / int(sizeof(Key)); i < kCount; i += kBytes / int(sizeof(Key))) {
    keys = larger(keys, load<Keys>(source + i) & kMask);
  }
  return largest_lane<Key, kBytes>(keys);
}

// Raises `keys` to those of `count` elements, a multiple of kStep.
template <class Element>
TE_DIST_INLINE void raise_keys(const typename Element::Storage* source, int count, typename Element::Key* keys) {
  using Key = typename Element::Key;
  using Keys = VectorOf<Key, kVectorBytes>;
  constexpr Key kMask = Key(Key(-1) >> 1);
  for (int i = 0; i < count; i += kVectorBytes / int(sizeof(Key))) {
    store(keys + i, larger(load<Keys>(keys + i), load<Keys>(source + i) & kMask));
  }
}

// The same, NaN left out: the rare way.
template <class Element>
static void raise_finite_keys(const typename Element::Storage* source, int count, typename Element::Key* keys) {
  using Key = typename Element::Key;
  for (int i = 0; i < count; ++i) {
    Key key;
    __builtin_memcpy(&key, source + i, sizeof key);
    key &= Key(Key(-1) >> 1);
    if (key <= Element::kNotFinite && key > keys[i]) keys[i] = key;
  }
}

// Amax of a run, NaN left out. `finite` says whether all elements are.
template <class Element, int kCount>
TE_DIST_INLINE float run_amax(const typename Element::Storage* source, bool* finite) {
  using Key = typename Element::Key;
  const uint32_t largest = largest_key<Element, kCount>(source);
  *finite = largest < Element::kNotFinite;
  if (__builtin_expect(*finite, 1)) return Element::magnitude_of(Key(largest));
  Key keys[kCount] = {};
  raise_finite_keys<Element>(source, kCount, keys);
  Key amax = 0;
  for (int i = 0; i < kCount; ++i) amax = amax > keys[i] ? amax : keys[i];
  return Element::magnitude_of(amax);
}

// Where codes go: into the cache, or past it (`out` aligned to the vector's size).
struct Cached {
  template <class Vector>
  TE_DIST_INLINE void put(uint8_t* out, Vector codes) {
    store(out, codes);
  }
};

struct Streamed {
  template <class Vector>
  TE_DIST_INLINE void put(uint8_t* out, Vector codes) {
    stream(out, codes);
  }
};

// FP8 codes of `count` elements, a multiple of kStep. With `kTrusted`, elements are finite and no product exceeds what
// rounds to the largest code, so that nothing has to be clamped.
template <class Element, class Code, bool kTrusted, class Sink = Cached, class Multipliers>
TE_DIST_INLINE void encode_row(const typename Element::Storage* source, int count, const Multipliers& multipliers,
                               uint8_t* out) {
  for (int i = 0; i < count; i += kStep) {
    const F32 scale_a = multipliers.at(i), scale_b = multipliers.at(i + kLanes);
    if constexpr (kTrusted && Element::interleaved) {
      const U16 words = load<U16>(source + i);
      const U32 pairs = reinterpret<U32>(words & uint16_t(0x7FFF));
      const U32 a = Code::round_magnitude(bits_of(float_of(pairs << 16) * scale_a));
      const U32 b = Code::round_magnitude(bits_of(float_of(pairs & 0xFFFF0000u) * scale_b));
      const U16 codes = interleave(a, b) & uint16_t(0x7F);
      Sink::put(out + i, narrow(codes | ((words >> 8) & uint16_t(0x80))));
    } else {
      const Step step = Element::load_step(source + i);
      Sink::put(out + i, codes_in_order<Element>(Code::encode(step.a * scale_a), Code::encode(step.b * scale_b)));
    }
  }
}

// Multiplying by a power of two only shifts exponents, so that bf16 elements can be rounded to FP8 in 16-bit lanes, as
// long as no code is subnormal. This holds what an element's magnitude is compared with, and what is taken off it.
template <class Code>
struct PowerOfTwo {
  static constexpr int kShift = 7 - (23 - Code::kShift);  // bits of a bf16 mantissa beyond the code's
  static constexpr int kRoundDown = (1 << (kShift - 1)) - 1;

  // The exponent field of the smallest bf16 number whose code is normal.
  TE_DIST_INLINE int threshold(float multiplier) {
    return int(Code::kMinNormalBits >> 23) - (int(bits_of(multiplier) >> 23) - 127);
  }
  TE_DIST_INLINE bool usable(int threshold) { return threshold >= 2 && threshold <= 254; }
  TE_DIST_INLINE uint16_t least(int threshold) { return uint16_t(threshold * 128 - 1); }
  TE_DIST_INLINE uint16_t offset(int threshold) { return uint16_t((threshold - 1) * 128 - kRoundDown); }

  TE_DIST_INLINE U16 encode(U16 words, U16 magnitude, U16 offset) {
    const U16 codes = (subtract_saturating(magnitude, offset) + ((magnitude >> kShift) & uint16_t(1))) >> kShift;
    return codes | ((words >> 8) & uint16_t(0x80));
  }
};

// FP8 codes of `kCount` finite bf16 elements times a power of two that maps none beyond the largest code. Gives up
// (false) where a code would be subnormal.
template <class Code, int kCount, class Sink>
TE_DIST_INLINE bool encode_run_by_power(const uint16_t* source, float multiplier, uint8_t* out) {
  using Power = PowerOfTwo<Code>;
  constexpr uint16_t kMagnitude = 0x7FFF;
  const int threshold = Power::threshold(multiplier);
  if (!Power::usable(threshold)) return false;
  U16 least = all<U16>(uint16_t(0xFFFF));
  for (int i = 0; i < kCount; i += kStep) {
    least = smaller(least, (load<U16>(source + i) & kMagnitude) - uint16_t(1));  // zero wraps around to the largest
  }
  if (any(least < all<U16>(Power::least(threshold)))) return false;
  const U16 offset = all<U16>(Power::offset(threshold));
  for (int i = 0; i < kCount; i += kStep) {
    const U16 words = load<U16>(source + i);
    Sink::put(out + i, narrow(Power::encode(words, words & kMagnitude, offset)));
  }
  return true;
}

// The same for rows of which every element has its own power of two, as `prepare` finds them once for many rows.
template <class Code, int kCount>
struct PowerRow {
  alignas(64) uint16_t least[kCount];
  alignas(64) uint16_t offset[kCount];

  bool prepare(const float* multipliers) {
    bool usable = true;
    for (int i = 0; i < kCount; ++i) {
      const int threshold = PowerOfTwo<Code>::threshold(multipliers[i]);
      usable &= PowerOfTwo<Code>::usable(threshold);
      least[i] = PowerOfTwo<Code>::least(threshold);
      offset[i] = PowerOfTwo<Code>::offset(threshold);
    }
    return usable;
  }

  bool encode(const uint16_t* source, uint8_t* out) const {
    auto too_small = all<U16>(uint16_t(0)) != all<U16>(uint16_t(0));
    for (int i = 0; i < kCount; i += kStep) {
      const U16 words = load<U16>(source + i), magnitude = words & uint16_t(0x7FFF);
      too_small |= magnitude - uint16_t(1) < load<U16>(least + i);
      store(out + i, narrow(PowerOfTwo<Code>::encode(words, magnitude, load<U16>(offset + i))));
    }
    return !any(too_small);
  }
};

// 4-bit codes of `count` elements, one in a byte; multipliers in the order of elements.
template <class Element>
TE_DIST_INLINE void encode_e2m1_row(const typename Element::Storage* source, int count, const float* multipliers,
                                    uint8_t* out) {
  for (int i = 0; i < count; i += kStep) {
    const F32 a = Element::load_lanes(source + i) * load<F32>(multipliers + i);
    const F32 b = Element::load_lanes(source + i + kLanes) * load<F32>(multipliers + i + kLanes);
    store(out + i, narrow(E2M1::encode(a), E2M1::encode(b)));
  }
}

}  // namespace te_dist::cpu::TE_DIST_ISA
