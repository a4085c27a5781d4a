// Random bytes of a panel: element i of the matrix takes byte i % 16 of block i / 16 of the Philox stream.
#pragma once

#include "../../numerics/philox.h"
#include "runs.cuh"

namespace te_dist::cuda {

// Twice the even, or the odd, bytes of a word, in halves.
TE_DIST_INLINE uint32_t doubled_bytes(uint32_t word, bool is_odd) {
  return (is_odd ? word >> 7 : word << 1) & 0x01FE01FEu;
}

// Of 32 bytes, the 16 behind the first `count`, below 16, into `block`.
TE_DIST_INLINE void skip_bytes(uint32_t count, PhiloxBlock& block, const PhiloxBlock& next) {
  uint32_t words[8];
#pragma unroll
  for (int w = 0; w < 8; ++w) words[w] = w < 4 ? block.words[w] : next.words[w - 4];
#pragma unroll
  for (int w = 0; w < 6; ++w) words[w] = count & 8u ? words[w + 2] : words[w];
#pragma unroll
  for (int w = 0; w < 5; ++w) words[w] = count & 4u ? words[w + 1] : words[w];
#pragma unroll
  for (int w = 0; w < 4; ++w) block.words[w] = __funnelshift_r(words[w], words[w + 1], 8 * (count & 3u));
}

// Draws the bytes of a strip's runs along rows. kAligned: every run has a block of its own.
template <bool kAligned, class RowStrip>
TE_DIST_INLINE void draw_noise(const int64_t* rng_state, const RowStrip& strip, int64_t cols, uint4 (&noise)[kRuns]) {
  const PhiloxState state{uint64_t(__ldg(rng_state)), uint64_t(__ldg(rng_state + 1))};
  const int64_t first = strip.row() * cols + strip.col();
  uint64_t indices[kRuns];
  PhiloxBlock blocks[kRuns], next[kRuns];
#pragma unroll
  for (int run = 0; run < kRuns; ++run) indices[run] = uint64_t((first + run * cols) >> 4);
  philox4x32(state, indices, blocks);
  if constexpr (!kAligned) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) ++indices[run];
    philox4x32(state, indices, next);
#pragma unroll
    for (int run = 0; run < kRuns; ++run) skip_bytes(uint32_t(first + run * cols) & 15u, blocks[run], next[run]);
  }
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    const uint32_t(&words)[4] = blocks[run].words;
    noise[run] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

}  // namespace te_dist::cuda
