// From sums in the registers of a warp to memory, four neighbours at a time: biases, rounding, and the way through shared
// memory. Params: those of the kernel, which name output and bias, their types, and whether four neighbours can be written
// at a time.
#pragma once

#include "memory.cuh"

namespace te_dist::cuda {

// Types of outputs and biases.
enum FloatType { kFloat32, kBFloat16, kFloat16 };

// Columns of a warp's 16 rows that go through shared memory at a time.
constexpr int kPatchCols = 32;
using SumsPatch = float[16][kPatchCols + 8];  // columns in different banks

template <class Params>
TE_DIST_INLINE float bias_of(const Params& p, int64_t index) {
  if (p.bias_type == kFloat32) return static_cast<const float*>(p.bias)[index];
  const uint32_t code = static_cast<const uint16_t*>(p.bias)[index];
  return p.bias_type == kBFloat16 ? BFloat16::value(code, 0) : Float16::value(code, 0);
}

// Puts a warp's sums, which lie in its registers as wgmma.cuh says, into a patch, from column `first` on.
TE_DIST_INLINE void put_patch(const float* sums, int first, SumsPatch& patch) {
  const int lane = threadIdx.x % 32;
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kPatchCols; j += 8) {
    const float* four = sums + (first + j) / 2;
    *reinterpret_cast<float2*>(&patch[lane / 4][j + lane % 4 * 2]) = float2{four[0], four[1]};
    *reinterpret_cast<float2*>(&patch[lane / 4 + 8][j + lane % 4 * 2]) = float2{four[2], four[3]};
  }
  __syncwarp();
}

template <class Element, class Params>
TE_DIST_INLINE void store_four(const Params& p, const float (&values)[4], int count, int64_t place) {
  char* out = static_cast<char*>(p.out) + place * Element::kBytes;
  const bool fits = count == 4 && p.fours_fit;
  uint32_t words[4] = {};
  if (Element::kPerWord == 1 && p.adds) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = i < count ? reinterpret_cast<const uint32_t*>(out)[i] : 0;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int w = i / Element::kPerWord;
    const float value = Element::kPerWord == 1 && p.adds ? float_of(words[w]) + values[i] : values[i];
    words[w] = i % Element::kPerWord ? words[w] | Element::store(value) << 16 : Element::store(value);
  }
  store_run<4 * Element::kBytes, Element::kBytes>(out, Inside{0, fits ? 0 : count * Element::kBytes}, words);
  if (fits) store_words<4 * Element::kBytes>(out, words);
}

// Writes `count` of four neighbours, or adds them to what is there; the first is element number `place` of the output.
template <class Params>
TE_DIST_INLINE void write_values(const Params& p, const float (&values)[4], int count, int64_t place) {
  if (p.out_type == kFloat32) {
    store_four<Float32>(p, values, count, place);
  } else if (p.out_type == kBFloat16) {
    store_four<BFloat16>(p, values, count, place);
  } else {
    store_four<Float16>(p, values, count, place);
  }
}

}  // namespace te_dist::cuda
