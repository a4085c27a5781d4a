// What a source reads, and a copy of it, where nothing else is done with it.
#pragma once

#include "common/source.cuh"

namespace te_dist::cuda {

// Writes those of eight values from `index` on that are inside. kWidth: bytes that can be written at a time, 16 or less.
template <class Type, int kWidth>
TE_DIST_INLINE void store_octet(void* first, int64_t index, const Inside& inside, const float (&values)[kPatch]) {
  constexpr int kBytes = kPatch * Type::kBytes, kAccess = kWidth < 16 ? Type::kBytes : 16;
  Octet<Type> words;
  store_values<Type>(words, [&](int w, int half) { return values[w * Type::kPerWord + half]; });
  store_run<kBytes, kAccess>(static_cast<char*>(first) + index * Type::kBytes, inside.scaled(Type::kBytes), words);
}

// No copy is written.
struct Nothing {
  static constexpr int kBytes = 0;
};

// Reads `count` elements, and writes them as `Copy`.
template <class Source, class Copy, int kWidth>
struct Pass {
  using Element = typename Source::Element;
  static constexpr int kThreads = 256;
  static constexpr int kBlocks = 2;
  static constexpr int kRounds = 4;  // of a block of threads, kPatch elements of each thread

  struct Params {
    typename Source::Params source;
    int64_t count;
    void* copy;
  };

  TE_DIST_INLINE void run(const Params& p, int64_t block) {
    for (int i = 0; i < kRounds; ++i) {
      const int64_t first = ((block * kRounds + i) * kThreads + threadIdx.x) * kPatch;
      const Inside inside = Inside::of(first, kPatch, p.count);
      if (inside.is_empty()) return;
      typename Source::template Reader<kWidth> reader(p.source, {1, p.count}, 0, first, inside);
      Octet<Element> words[1];
      reader.read({0, 1}, words);
      if constexpr (Copy::kBytes > 0) {
        float values[kPatch];
#pragma unroll
        for (int j = 0; j < kPatch; ++j) values[j] = Element::value(words[0][j / Element::kPerWord], j % Element::kPerWord);
        store_octet<Copy, kWidth>(p.copy, first, inside, values);
      }
    }
  }
};

}  // namespace te_dist::cuda
