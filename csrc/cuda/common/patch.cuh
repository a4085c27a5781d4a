// How a block of threads divides a panel of elements: every thread holds a patch of 8 x 8 in registers.
#pragma once

#include "memory.cuh"

namespace te_dist::cuda {

constexpr int kPanel = 128;
constexpr int kPatch = 8;
constexpr int kPanelThreads = 256;
constexpr int kWarps = kPanelThreads / 32;
constexpr uint32_t kFullWarp = 0xFFFFFFFFu;

TE_DIST_INLINE int64_t panels_along(int64_t extent, int length = kPanel) { return (extent + length - 1) / length; }

// Patches of a panel. A warp holds kPatchRows rows of them; the lowest bits of a lane say which row, the others which column.
template <int kPatchRows_>
struct PanelLanes {
  static constexpr int kPatchRows = kPatchRows_;
  static constexpr int kWarpRows = kPatchRows * kPatch;
  static constexpr int kRows = kWarps * kWarpRows, kCols = 32 / kPatchRows * kPatch;

  TE_DIST_INLINE int row(int thread) { return thread / 32 * kWarpRows + (thread & (kPatchRows - 1)) * kPatch; }
  TE_DIST_INLINE int col(int thread) { return (thread & 31) / kPatchRows * kPatch; }
};

using SquareLanes = PanelLanes<2>;  // of kPanel x kPanel elements
using WideLanes = PanelLanes<1>;    // of half as many rows and twice as many columns
using TallLanes = PanelLanes<4>;    // the other way round

// Where a thread's patch lies. Panels are aligned to tiles, so the first panel begins `phase` before the matrix.
struct Place {
  Extents extents;
  int64_t panel_row, panel_col;  // which panel
  int64_t row, col;              // first element of the patch in the matrix; may be negative
  int local_row, local_col;      // the same inside the panel
  Inside rows, cols;             // of the patch that lie in the matrix

  template <class Lanes = SquareLanes>
  TE_DIST_INLINE Place of(const Extents& extents, const Phase& phase, int64_t panel) {
    return of<Lanes>(extents, phase, panel, Lanes::row(threadIdx.x), Lanes::col(threadIdx.x));
  }

  // Of the patch that begins at (local_row, local_col) inside the panel.
  template <class Lanes = SquareLanes>
  TE_DIST_INLINE Place of(const Extents& extents, const Phase& phase, int64_t panel, int local_row, int local_col) {
    Place place;
    const int64_t panel_cols = panels_along(phase.col + extents.cols, Lanes::kCols);
    place.extents = extents;
    place.panel_row = panel / panel_cols;
    place.panel_col = panel - place.panel_row * panel_cols;
    place.local_row = local_row;
    place.local_col = local_col;
    place.row = place.panel_row * Lanes::kRows - phase.row + place.local_row;
    place.col = place.panel_col * Lanes::kCols - phase.col + place.local_col;
    place.rows = Inside::of(place.row, kPatch, extents.rows);
    place.cols = Inside::of(place.col, kPatch, extents.cols);
    return place;
  }

  // The same in the panel that lies so many columns to the right.
  template <class Lanes = SquareLanes>
  TE_DIST_DEVICE Place moved(int64_t columns) const {
    Place place = *this;
    place.panel_col += columns / Lanes::kCols;
    place.col += columns;
    place.cols = Inside::of(place.col, kPatch, extents.cols);
    return place;
  }

  TE_DIST_DEVICE int64_t first_row() const { return row - local_row; }
  TE_DIST_DEVICE int64_t first_col() const { return col - local_col; }
};

template <class Element>
struct Patch {
  static constexpr int kWords = kPatch / Element::kPerWord;
  uint32_t words[kPatch][kWords];

  // Keeps the compiler from holding elements unpacked, twice as many registers, from one direction to the next.
  TE_DIST_DEVICE void keep_packed() {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) asm volatile("" : "+r"(words[i][w]));
    }
  }

  // Other rows become zeros.
  TE_DIST_DEVICE void keep_rows(const Inside& rows) {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[i][w] = rows.has(i) ? words[i][w] : 0;
    }
  }

  TE_DIST_DEVICE float value(int row, int col) const {
    return Element::value(words[row][col / Element::kPerWord], col % Element::kPerWord);
  }

  TE_DIST_DEVICE void row(int i, float (&values)[kPatch]) const {
#pragma unroll
    for (int j = 0; j < kPatch; ++j) values[j] = value(i, j);
  }

  TE_DIST_DEVICE void column(int j, float (&values)[kPatch]) const {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) values[i] = value(i, j);
  }

  // Largest magnitude of each row.
  TE_DIST_DEVICE void row_amax(float (&amax)[kPatch]) const {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      uint32_t largest = 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) largest = Element::raise(largest, words[i][w]);
      amax[i] = Element::largest(largest);
    }
  }

  // Largest magnitudes of the columns, as words of elements.
  TE_DIST_DEVICE void col_amax(uint32_t (&amax)[kWords]) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      amax[w] = 0;
#pragma unroll
      for (int i = 0; i < kPatch; ++i) amax[w] = Element::raise(amax[w], words[i][w]);
    }
  }

  // Puts the largest magnitudes of the columns in the rows of a warp into shared memory, for all warps to read.
  template <class Lanes = SquareLanes>
  TE_DIST_DEVICE void share_col_amax(const Place& place, float (&of_warps)[kWarps][Lanes::kCols]) const {
    static_assert(Lanes::kPatchRows <= 2, "at most two lanes hold the same columns: they are compared once");
    uint32_t columns[kWords];
    col_amax(columns);
#pragma unroll
    for (int w = 0; w < kWords && Lanes::kPatchRows == 2; ++w) {
      columns[w] = Element::raise(columns[w], __shfl_xor_sync(kFullWarp, columns[w], 1));
    }
    if (threadIdx.x % Lanes::kPatchRows != 0) return;
    float* target = &of_warps[threadIdx.x / 32][place.local_col];
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      target[j] = Element::value(columns[j / Element::kPerWord], j % Element::kPerWord);
    }
  }

  // Word of the largest magnitudes.
  TE_DIST_DEVICE uint32_t largest() const {
    uint32_t columns[kWords], largest = 0;
    col_amax(columns);
#pragma unroll
    for (int w = 0; w < kWords; ++w) largest = Element::raise(largest, columns[w]);
    return largest;
  }

  TE_DIST_DEVICE float amax() const { return Element::largest(largest()); }
};

TE_DIST_INLINE void fill(float (&values)[kPatch], float value) {
#pragma unroll
  for (int i = 0; i < kPatch; ++i) values[i] = value;
}

// The larger of a value and that of the lane whose number differs in `mask`.
TE_DIST_INLINE float larger_of_lanes(float value, int mask) {
  return fmaxf(value, __shfl_xor_sync(kFullWarp, value, mask));
}

// The largest of all threads' magnitudes, whose order is that of their bits. `of_warps` is not read or written otherwise
// until the next barrier.
TE_DIST_INLINE float largest_of_block(float magnitude, float (&of_warps)[kWarps]) {
  of_warps[threadIdx.x / 32] = float_of(__reduce_max_sync(kFullWarp, bits_of(magnitude)));
  __syncthreads();
  float largest = of_warps[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) largest = fmaxf(largest, of_warps[w]);
  return largest;
}

// Raises what is not negative to a magnitude. Most are smaller than what is there already: reading is cheaper than an
// atomic that changes nothing.
TE_DIST_INLINE void raise_amax(float* amax, float magnitude) {
  if (__ldcg(amax) < magnitude) atomicMax(reinterpret_cast<uint32_t*>(amax), bits_of(magnitude));
}

// Maxima, or sums, over lanes, shared out so that each is found, and what follows from it computed, by few lanes. Of
// kPatch values in every lane, those of the lanes that differ in `kMasks` are combined; afterwards a lane owns kOwned of
// the results, and `of` hands one to all.
template <int... kMasks>
struct SharedOut {
  static constexpr int kHalvings = sizeof...(kMasks) < 3 ? sizeof...(kMasks) : 3;
  static constexpr int kOwned = kPatch >> kHalvings;
  static constexpr int kAllMasks = (kMasks | ...);

  // Index of the first value that this lane owns.
  TE_DIST_INLINE int first() {
    const int masks[] = {kMasks...};
    int index = 0;
#pragma unroll
    for (int h = 0; h < kHalvings; ++h) index |= threadIdx.x & masks[h] ? kPatch >> (h + 1) : 0;
    return index;
  }

  // Whether this lane is the one, of several that own the same values, which writes them.
  TE_DIST_INLINE bool writes() {
    const int masks[] = {kMasks...};
    int rest = 0;
#pragma unroll
    for (int h = kHalvings; h < int(sizeof...(kMasks)); ++h) rest |= masks[h];
    return (threadIdx.x & rest) == 0;
  }

  TE_DIST_INLINE void largest(float (&values)[kPatch], float (&owned)[kOwned]) {
    combine(values, owned, [](float a, float b) { return fmaxf(a, b); });
  }

  // In the order of the masks.
  TE_DIST_INLINE void sum(float (&values)[kPatch], float (&owned)[kOwned]) {
    combine(values, owned, [](float a, float b) { return a + b; });
  }

  template <class Combine>
  TE_DIST_INLINE void combine(float (&values)[kPatch], float (&owned)[kOwned], const Combine& both) {
    const int masks[] = {kMasks...};
#pragma unroll
    for (int h = 0; h < kHalvings; ++h) {
      const bool upper = threadIdx.x & masks[h];
      const int count = kPatch >> (h + 1);
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const float kept = upper ? values[count + i] : values[i];
        const float given = upper ? values[i] : values[count + i];
        values[i] = both(kept, __shfl_xor_sync(kFullWarp, given, masks[h]));
      }
    }
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      owned[i] = values[i];
#pragma unroll
      for (int h = kHalvings; h < int(sizeof...(kMasks)); ++h) {
        owned[i] = both(owned[i], __shfl_xor_sync(kFullWarp, owned[i], masks[h]));
      }
    }
  }

  // Value number `index` (a constant), from the lane that owns it.
  TE_DIST_INLINE float of(const float (&owned)[kOwned], int index) {
    const int masks[] = {kMasks...};
    int lane = threadIdx.x & 31 & ~kAllMasks;
#pragma unroll
    for (int h = 0; h < kHalvings; ++h) lane |= index & kPatch >> (h + 1) ? masks[h] : 0;
    return __shfl_sync(kFullWarp, owned[index % kOwned], lane);
  }
};

}  // namespace te_dist::cuda
