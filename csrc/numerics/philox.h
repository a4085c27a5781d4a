// Philox4x32-10, the counter-based generator behind stochastic rounding.
#pragma once

#include "platform.h"

namespace te_dist {

constexpr int kPhiloxRounds = 10;
constexpr uint64_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxKey0 = 0x9E3779B9u, kPhiloxKey1 = 0xBB67AE85u;

struct PhiloxState {
  uint64_t seed;
  uint64_t offset;
};

struct PhiloxBlock {
  uint32_t words[4];
};

// Blocks that hold their counters become 16 random bytes each, words in order, each little endian. They share the keys.
template <int kCount>
TE_DIST_INLINE void philox_rounds(uint64_t seed, PhiloxBlock (&blocks)[kCount]) {
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (int i = 0; i < kCount; ++i) {
      uint32_t(&c)[4] = blocks[i].words;
      const uint64_t product0 = kPhiloxMultiplier0 * c[0];
      const uint64_t product1 = kPhiloxMultiplier1 * c[2];
      c[0] = uint32_t(product1 >> 32) ^ c[1] ^ k0;
      c[1] = uint32_t(product1);
      c[2] = uint32_t(product0 >> 32) ^ c[3] ^ k1;
      c[3] = uint32_t(product0);
    }
    k0 += kPhiloxKey0;
    k1 += kPhiloxKey1;
  }
}

// Blocks numbered `indices` of a stream.
template <int kCount>
TE_DIST_INLINE void philox4x32(PhiloxState state, const uint64_t (&indices)[kCount], PhiloxBlock (&blocks)[kCount]) {
  for (int i = 0; i < kCount; ++i) {
    const uint64_t counter = state.offset + indices[i];
    blocks[i] = {{uint32_t(counter), uint32_t(counter >> 32), 0, 0}};
  }
  philox_rounds(state.seed, blocks);
}

TE_DIST_INLINE PhiloxBlock philox4x32(PhiloxState state, uint64_t index) {
  PhiloxBlock block[1];
  philox4x32<1>(state, {index}, block);
  return block[0];
}

TE_DIST_INLINE uint32_t philox_byte(const PhiloxBlock& block, uint32_t position) {
  return (block.words[position / 4] >> (8 * (position % 4))) & 0xFFu;
}

}  // namespace te_dist
