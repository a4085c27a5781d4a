// Random bytes of a patch: element i of the matrix takes byte i % 16 of block i / 16 of the Philox stream.
#pragma once

#include "../../numerics/philox.h"
#include "patch.cuh"

namespace te_dist::cuda {

template <bool kDrawn>
struct Noise {
  uint32_t words[kPatch][2];  // bytes of each row's eight elements

  // A byte becomes the low end of 2^23 + byte: quicker than a conversion of an integer.
  TE_DIST_DEVICE float at(int row, int col) const {
    return float_of(__byte_perm(words[row][col / 4], 0x4B000000u, 0x7440u | uint32_t(col % 4))) - 8388608.0f;
  }

  // kAligned: 16 elements of one block lie in two lanes beside each other, of which each draws for four rows of both.
  template <bool kAligned>
  TE_DIST_DEVICE void draw(const PhiloxState& state, const Place& place) {
    if constexpr (kAligned) {
      draw_for_two(state, place);
    } else {
#pragma unroll
      for (int i = 0; i < kPatch; ++i) draw_row(state, (place.row + i) * place.extents.cols + place.col, words[i]);
    }
  }

 private:
  TE_DIST_DEVICE void draw_for_two(const PhiloxState& state, const Place& place) {
    constexpr int kBeside = 2;
    const bool is_right = threadIdx.x & kBeside;
    const int first = is_right ? kPatch / 2 : 0;
    const int64_t col = place.col - (is_right ? kPatch : 0);
#pragma unroll
    for (int i = 0; i < kPatch / 2; ++i) {
      const uint64_t index = uint64_t((place.row + first + i) * place.extents.cols + col);
      const PhiloxBlock block = philox4x32(state, index / 16);
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const uint32_t own = is_right ? block.words[2 + w] : block.words[w];
        const uint32_t given = is_right ? block.words[w] : block.words[2 + w];
        const uint32_t taken = __shfl_xor_sync(kFullWarp, given, kBeside);
        words[i][w] = is_right ? taken : own;
        words[kPatch / 2 + i][w] = is_right ? own : taken;
      }
    }
  }

  TE_DIST_INLINE void draw_row(const PhiloxState& state, int64_t first, uint32_t (&bytes)[2]) {
    const int64_t last = first + kPatch - 1;
    const PhiloxBlock low = philox4x32(state, uint64_t(first >> 4));
    const PhiloxBlock high = philox4x32(state, uint64_t(last >> 4));
    bytes[0] = bytes[1] = 0;
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      const int64_t i = first + j;
      const uint32_t position = uint32_t(i & 15), word = position / 4;
      const bool in_low = i >> 4 == first >> 4;
      const uint32_t a = in_low ? low.words[0] : high.words[0], b = in_low ? low.words[1] : high.words[1];
      const uint32_t c = in_low ? low.words[2] : high.words[2], d = in_low ? low.words[3] : high.words[3];
      const uint32_t chosen = word < 2 ? (word ? b : a) : (word == 2 ? c : d);
      bytes[j / 4] |= ((chosen >> (8 * (position % 4))) & 0xFFu) << (8 * (j % 4));
    }
  }
};

}  // namespace te_dist::cuda
