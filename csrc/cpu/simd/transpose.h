// Transposes of blocks of 1, 2 or 4 byte elements in vector registers.
#pragma once

#include "vector.h"

namespace te_dist::cpu::TE_DIST_ISA {

using Bytes = VectorOf<uint8_t, kVectorBytes>;
constexpr int kGroups = kVectorBytes / 16;  // groups of 16 bytes in a vector

// Interleaves the lower (or upper) halves of corresponding groups of 16 bytes, in units of T.
template <class T>
TE_DIST_INLINE void interleave_groups(Bytes a, Bytes b, Bytes* low, Bytes* high) {
#if defined(__AVX512BW__)
  using Raw = __m512i;
  const Raw x = reinterpret<Raw>(a), y = reinterpret<Raw>(b);
  Raw l, h;
  if constexpr (sizeof(T) == 1) l = _mm512_unpacklo_epi8(x, y), h = _mm512_unpackhi_epi8(x, y);
  if constexpr (sizeof(T) == 2) l = _mm512_unpacklo_epi16(x, y), h = _mm512_unpackhi_epi16(x, y);
  if constexpr (sizeof(T) == 4) l = _mm512_unpacklo_epi32(x, y), h = _mm512_unpackhi_epi32(x, y);
#elif defined(__AVX2__)
  using Raw = __m256i;
  const Raw x = reinterpret<Raw>(a), y = reinterpret<Raw>(b);
  Raw l, h;
  if constexpr (sizeof(T) == 1) l = _mm256_unpacklo_epi8(x, y), h = _mm256_unpackhi_epi8(x, y);
  if constexpr (sizeof(T) == 2) l = _mm256_unpacklo_epi16(x, y), h = _mm256_unpackhi_epi16(x, y);
  if constexpr (sizeof(T) == 4) l = _mm256_unpacklo_epi32(x, y), h = _mm256_unpackhi_epi32(x, y);
#elif defined(__SSE2__)
  using Raw = __m128i;
  const Raw x = reinterpret<Raw>(a), y = reinterpret<Raw>(b);
  Raw l, h;
  if constexpr (sizeof(T) == 1) l = _mm_unpacklo_epi8(x, y), h = _mm_unpackhi_epi8(x, y);
  if constexpr (sizeof(T) == 2) l = _mm_unpacklo_epi16(x, y), h = _mm_unpackhi_epi16(x, y);
  if constexpr (sizeof(T) == 4) l = _mm_unpacklo_epi32(x, y), h = _mm_unpackhi_epi32(x, y);
#else
  using Raw = VectorOf<T, 16>;
  const Raw x = reinterpret<Raw>(a), y = reinterpret<Raw>(b);
  constexpr int kHalf = 8 / int(sizeof(T));
  Raw l, h;
  for (int i = 0; i < kHalf; ++i) {
    l[2 * i] = x[i], l[2 * i + 1] = y[i];
    h[2 * i] = x[kHalf + i], h[2 * i + 1] = y[kHalf + i];
  }
#endif
  *low = reinterpret<Bytes>(l);
  *high = reinterpret<Bytes>(h);
}

// Groups of 16 bytes from `kGroups` places, `stride` bytes apart.
TE_DIST_INLINE Bytes load_groups(const char* source, int64_t stride) {
#if defined(__AVX512BW__)
  __m512i v = _mm512_castsi128_si512(load<__m128i>(source));
  v = _mm512_inserti64x2(v, load<__m128i>(source + stride), 1);
  v = _mm512_inserti64x2(v, load<__m128i>(source + 2 * stride), 2);
  return reinterpret<Bytes>(_mm512_inserti64x2(v, load<__m128i>(source + 3 * stride), 3));
#elif defined(__AVX2__)
  const __m256i v = _mm256_castsi128_si256(load<__m128i>(source));
  return reinterpret<Bytes>(_mm256_inserti128_si256(v, load<__m128i>(source + stride), 1));
#else
  (void)stride;
  return load<Bytes>(source);
#endif
}

// Extents of what is transposed in registers at a time.
template <class T>
constexpr int kTransposeCols = 16 / int(sizeof(T));
template <class T>
constexpr int kTransposeRows = kVectorBytes / int(sizeof(T));

// out[c][r] = src[r][c] for kTransposeRows x kTransposeCols elements; strides in elements. Each pass over the registers
// rotates the bits of an element's (row, col) index by one; after as many as a column index has, rows and columns are
// swapped.
template <class T, bool kStream>
TE_DIST_INLINE void transpose_in_registers(const T* src, int64_t src_stride, T* out, int64_t out_stride) {
  constexpr int kCount = kTransposeCols<T>;
  Bytes v[kCount], w[kCount];
  for (int i = 0; i < kCount; ++i) {
    const char* first = reinterpret_cast<const char*>(src + i * src_stride);
    v[i] = load_groups(first, kCount * src_stride * int64_t(sizeof(T)));
  }
  for (int pass = 1; pass < kCount; pass *= 2) {
    for (int i = 0; i < kCount / 2; ++i) interleave_groups<T>(v[i], v[i + kCount / 2], &w[2 * i], &w[2 * i + 1]);
    for (int i = 0; i < kCount; ++i) v[i] = w[i];
  }
  for (int i = 0; i < kCount; ++i) {
    if constexpr (kStream) {
      stream(out + i * out_stride, v[i]);
    } else {
      store(out + i * out_stride, v[i]);
    }
  }
}

template <class T>
static inline void transpose_one_by_one(const T* src, int64_t src_stride, int rows, int cols, T* out,
                                        int64_t out_stride) {
  for (int c = 0; c < cols; ++c) {
    for (int r = 0; r < rows; ++r) out[c * out_stride + r] = src[r * src_stride + c];
  }
}

// out[c][r] = src[r][c]; strides in elements. `src` should lie close together in the cache. Streams where the output
// permits it and `kStream` asks for it.
template <class T, bool kStream = false>
static inline void transpose_block(const T* src, int64_t src_stride, int rows, int cols, T* out, int64_t out_stride) {
  constexpr int kRows = kTransposeRows<T>, kCols = kTransposeCols<T>;
  const int whole_rows = rows / kRows * kRows, whole_cols = cols / kCols * kCols;
  const bool aligned =
      reinterpret_cast<uintptr_t>(out) % kVectorBytes == 0 && out_stride * int64_t(sizeof(T)) % kVectorBytes == 0;
  // Column by column, so that what is written to one place is contiguous.
  for (int c = 0; c < whole_cols; c += kCols) {
    for (int r = 0; r < whole_rows; r += kRows) {
      const T* source = src + r * src_stride + c;
      T* target = out + c * out_stride + r;
      if (kStream && aligned) {
        transpose_in_registers<T, true>(source, src_stride, target, out_stride);
      } else {
        transpose_in_registers<T, false>(source, src_stride, target, out_stride);
      }
    }
  }
  transpose_one_by_one(src + whole_rows * src_stride, src_stride, rows - whole_rows, whole_cols, out + whole_rows,
                       out_stride);
  transpose_one_by_one(src + whole_cols, src_stride, rows, cols - whole_cols, out + whole_cols * out_stride,
                       out_stride);
}

// Extents of a block that `transpose_far_block` takes.
constexpr int kFarRows = 128;
template <class T>
constexpr int kFarCols = 128 / int(sizeof(T));

// The same for a part of a matrix in memory. Its rows are gathered first: where they are a power of two apart they
// would drive each other out of the cache while pieces of them are read.
template <class T, bool kStream = false>
static inline void transpose_far_block(const T* src, int64_t src_stride, int rows, int cols, T* out,
                                       int64_t out_stride) {
  alignas(64) T near[kFarRows][kFarCols<T>];
  for (int r = 0; r < rows; ++r) {
    const T* source = src + r * src_stride;
    if (cols == kFarCols<T>) {
      __builtin_memcpy(near[r], source, sizeof near[r]);
    } else {
      __builtin_memcpy(near[r], source, sizeof(T) * size_t(cols));
    }
  }
  transpose_block<T, kStream>(near[0], kFarCols<T>, rows, cols, out, out_stride);
}

}  // namespace te_dist::cpu::TE_DIST_ISA
