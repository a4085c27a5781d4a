// The sum of matrices that lie below each other.
#pragma once

#include "common/memory.cuh"

namespace te_dist::cuda {

// kWidth: values of a row that a thread adds, 1, 2 or 4.
template <class Element, int kWidth>
struct AddParts {
  static constexpr int kThreads = 256, kBlocks = 4;

  struct Params {
    const float* x;  // (parts, count)
    int64_t count;
    int32_t parts;
    int32_t adds;  // to what `out`, fp32, holds
    int64_t cols;
    void* out;      // (count / cols, cols)
    int64_t pitch;  // of `out`, in elements
  };

  TE_DIST_INLINE void run(const Params& p) {
    const int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
    if (at >= p.count) return;
    float sums[kWidth] = {};
    for (int part = 0; part < p.parts; ++part) {
      uint32_t words[kWidth];
      load_words<4 * kWidth>(p.x + part * p.count + at, words);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sums[i] = part ? sums[i] + float_of(words[i]) : float_of(words[i]);
    }
    const int64_t row = at / p.cols;
    char* target = static_cast<char*>(p.out) + (row * p.pitch + at - row * p.cols) * Element::kBytes;
    uint32_t words[kWidth];
    if constexpr (Element::kBytes == 4) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        words[i] = bits_of(p.adds ? reinterpret_cast<const float*>(target)[i] + sums[i] : sums[i]);
      }
    } else if constexpr (kWidth == 1) {
      words[0] = Element::store(sums[0]);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) words[i] = Element::store_pair(sums[2 * i], sums[2 * i + 1]);
    }
    store_words<Element::kBytes * kWidth>(target, words);
  }
};

}  // namespace te_dist::cuda
