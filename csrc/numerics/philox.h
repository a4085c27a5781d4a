// Philox4x32-10, the counter-based generator behind stochastic rounding.
#pragma once

#include "platform.h"

namespace te_dist {

struct PhiloxState {
  uint64_t seed;
  uint64_t offset;
};

struct PhiloxBlock {
  uint32_t words[4];
};

// The block numbered `index` of a stream: 16 random bytes, words in order, each little endian.
TE_DIST_INLINE PhiloxBlock philox4x32(PhiloxState state, uint64_t index) {
  const uint64_t counter = state.offset + index;
  uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = uint32_t(state.seed), k1 = uint32_t(state.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t(0xD2511F53u) * c0;
    const uint64_t product1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(product1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(product1);
    c2 = uint32_t(product0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

TE_DIST_INLINE uint32_t philox_byte(const PhiloxBlock& block, uint32_t position) {
  return (block.words[position / 4] >> (8 * (position % 4))) & 0xFFu;
}

}  // namespace te_dist
