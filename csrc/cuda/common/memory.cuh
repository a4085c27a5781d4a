// Accesses of a given width. Widths are bytes, powers of two up to 16.
#pragma once

#include "types.cuh"

namespace te_dist::cuda {

// Reads kWidth bytes, through the cache for data that no kernel writes meanwhile, into 32-bit words; a width below 4
// fills the low bits of one word.
template <int kWidth>
TE_DIST_INLINE void load_words(const void* source, uint32_t* words) {
  static_assert(kWidth == 1 || kWidth == 2 || kWidth == 4 || kWidth == 8 || kWidth == 16, "no such access");
  if constexpr (kWidth == 16) {
    const uint4 v = __ldg(static_cast<const uint4*>(source));
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (kWidth == 8) {
    const uint2 v = __ldg(static_cast<const uint2*>(source));
    words[0] = v.x, words[1] = v.y;
  } else if constexpr (kWidth == 4) {
    words[0] = __ldg(static_cast<const uint32_t*>(source));
  } else if constexpr (kWidth == 2) {
    words[0] = __ldg(static_cast<const uint16_t*>(source));
  } else {
    words[0] = __ldg(static_cast<const uint8_t*>(source));
  }
}

template <int kWidth>
TE_DIST_INLINE void store_words(void* target, const uint32_t* words) {
  static_assert(kWidth == 1 || kWidth == 2 || kWidth == 4 || kWidth == 8 || kWidth == 16, "no such access");
  if constexpr (kWidth == 16) {
    *static_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
  } else if constexpr (kWidth == 8) {
    *static_cast<uint2*>(target) = make_uint2(words[0], words[1]);
  } else if constexpr (kWidth == 4) {
    *static_cast<uint32_t*>(target) = words[0];
  } else if constexpr (kWidth == 2) {
    *static_cast<uint16_t*>(target) = uint16_t(words[0]);
  } else {
    *static_cast<uint8_t*>(target) = uint8_t(words[0]);
  }
}

// Whether the flag that turns a launch off is there and has any bit set.
TE_DIST_INLINE bool is_set(const uint32_t* noop) { return noop && *noop; }

// Bytes of a run, counted from its first, that lie in the matrix.
struct Inside {
  int begin;
  int end;

  // Of `length` from `first` on, with respect to [0, extent).
  TE_DIST_INLINE Inside of(int64_t first, int length, int64_t extent) {
    const int64_t stop = extent - first;
    return {first < 0 ? (first > -length ? int(-first) : length) : 0, stop < length ? (stop > 0 ? int(stop) : 0) : length};
  }

  TE_DIST_DEVICE bool has(int index) const { return index >= begin && index < end; }
  TE_DIST_DEVICE bool is_empty() const { return begin >= end; }
  TE_DIST_DEVICE Inside scaled(int factor) const { return {begin * factor, end * factor}; }
  TE_DIST_DEVICE Inside only_if(bool condition) const { return {begin, condition ? end : 0}; }
};

// Reads kBytes from `first` on in pieces of kWidth; a piece that is not inside becomes zeros. Addresses, and where the
// inside begins and ends, are multiples of kWidth.
template <int kBytes, int kWidth>
TE_DIST_INLINE void load_run(const char* first, Inside inside, uint32_t* words) {
#pragma unroll
  for (int i = 0; i < kBytes; i += kWidth) {
    if constexpr (kWidth >= 4) {
#pragma unroll
      for (int j = 0; j < kWidth / 4; ++j) words[i / 4 + j] = 0;
      if (inside.has(i)) load_words<kWidth>(first + i, words + i / 4);
    } else {
      uint32_t piece = 0;
      if (inside.has(i)) load_words<kWidth>(first + i, &piece);
      words[i / 4] = i % 4 ? words[i / 4] | piece << (8 * (i % 4)) : piece;
    }
  }
}

// Writes kBytes in pieces of kWidth, but for those that are not inside.
template <int kBytes, int kWidth>
TE_DIST_INLINE void store_run(char* first, Inside inside, const uint32_t* words) {
#pragma unroll
  for (int i = 0; i < kBytes; i += kWidth) {
    if (!inside.has(i)) continue;
    if constexpr (kWidth >= 4) {
      store_words<kWidth>(first + i, words + i / 4);
    } else {
      const uint32_t piece = words[i / 4] >> (8 * (i % 4));
      store_words<kWidth>(first + i, &piece);
    }
  }
}

}  // namespace te_dist::cuda
