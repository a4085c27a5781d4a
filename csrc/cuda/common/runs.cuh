// How a block of threads divides a panel of 128 x 128 elements into runs of 16: every thread holds four beside each other.
#pragma once

#include "butterfly.cuh"
#include "panels.cuh"
#include "source.cuh"

namespace te_dist::cuda {

constexpr int kRun = 16;
constexpr int kRuns = 4;

// How many panels lie side by side, and 2^32 divided by it, rounded down and below 2^32.
struct PanelGrid {
  uint32_t across, reciprocal;
};

// A panel of the grid. Panels are aligned to tiles, so the first begins before the matrix where it has a phase.
struct Panel : View {
  int64_t row, col;   // its first element in the matrix; may be negative
  Inside rows, cols;  // of the panel that lie in the matrix
  bool is_whole;      // all of it does

  // Number `index` of those from left to right, top to bottom.
  template <class Panels>
  TE_DIST_INLINE Panel of(const Extents& all, const Panels& panels, const PanelGrid& grid, uint32_t index) {
    uint32_t panel_row = __umulhi(index, grid.reciprocal), panel_col = index - panel_row * grid.across;
    if (panel_col >= grid.across) ++panel_row, panel_col -= grid.across;  // the quotient was that, or one less
    const View view = panels.view_of_tile(all, int(panel_row));
    const int64_t row = int64_t(panel_row) * kPanel - view.phase.row, col = int64_t(panel_col) * kPanel - view.phase.col;
    const Inside rows = Inside::of(row, kPanel, view.extents.rows), cols = Inside::of(col, kPanel, view.extents.cols);
    const bool is_whole = rows.begin == 0 && rows.end == kPanel && cols.begin == 0 && cols.end == kPanel;
    return {view, row, col, rows, cols, is_whole};
  }
};

// Of a range inside a panel, seen from its element number `first`.
TE_DIST_INLINE Inside seen_from(const Inside& inside, int first) { return {inside.begin - first, inside.end - first}; }

// Bytes of two words, chosen by the nibbles of `bytes`; 8 and more: as masks of their signs.
TE_DIST_INLINE uint32_t gathered(uint32_t low, uint32_t high, uint32_t bytes) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(bytes));
  return result;
}

// Signs of eight elements: of every second one, as bytes all of whose bits are the sign.
struct Signs {
  uint32_t even, odd;

  // Of 16-bit elements in four words.
  TE_DIST_INLINE Signs of_words(const uint32_t* words) {
    const uint32_t low = gathered(words[0], words[1], 0x7531), high = gathered(words[2], words[3], 0x7531);
    return {gathered(low, high, 0xECA8), gathered(low, high, 0xFDB9)};
  }

  // With eight magnitudes in the nibbles of a word, in place of their highest bits.
  TE_DIST_DEVICE uint32_t joined(uint32_t magnitudes) const {
    const uint32_t with_even = (even & 0x08080808u) | (magnitudes & ~0x08080808u);
    return (odd & 0x80808080u) | (with_even & ~0x80808080u);
  }
};

// The part of a panel that a thread holds: four runs along rows (4 x 16 elements) or along columns (16 x 4). A warp holds
// the same 16 rows either way; the lanes that hold a square of 16 x 16 differ in two bits.
template <class Element, bool kAlongRows>
struct Strip {
  static constexpr int kRows = kAlongRows ? kRuns : kRun, kCols = kAlongRows ? kRun : kRuns;
  static constexpr int kLanesAcross = kPanel / kCols;
  static constexpr int kSquareLanes[2] = {kAlongRows ? 8 : 1, kAlongRows ? 16 : 2};
  static constexpr int kPerWord = Element::kPerWord, kWords = kCols / kPerWord;

  int local_row, local_col;  // of its first element in the panel
  int64_t row, col;          // and in the matrix
  Inside rows, cols;         // counted from there, what lies in the matrix
  uint32_t words[kRows][kWords];

  TE_DIST_DEVICE explicit Strip(const Panel& panel) {
    const int lane = threadIdx.x % 32;
    local_row = threadIdx.x / 32 * kRun + lane / kLanesAcross * kRows;
    local_col = lane % kLanesAcross * kCols;
    row = panel.row + local_row;
    col = panel.col + local_col;
    rows = seen_from(panel.rows, local_row);
    cols = seen_from(panel.cols, local_col);
  }

  // In the same place.
  template <class Other>
  TE_DIST_DEVICE explicit Strip(const Strip<Other, kAlongRows>& other)
      : local_row(other.local_row), local_col(other.local_col), row(other.row), col(other.col), rows(other.rows),
        cols(other.cols) {}

  // kWidth: bytes that every address is a multiple of. What lies outside of the matrix is zero.
  template <class Source, int kWidth>
  TE_DIST_DEVICE void load(const typename Source::Params& p, const Panel& panel) {
    // What is computed is long: instructions for whole panels alone would not fit beside the others in their cache.
    if (!Source::kIsComputed && panel.is_whole) {
      read_any<Source, kWidth>(p, panel, {0, kRows}, {0, kCols});
    } else {
      read_any<Source, kWidth>(p, panel, rows, cols);
    }
  }

  // Rows that are outside become zeros.
  TE_DIST_DEVICE void keep_rows() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[i][w] = rows.has(i) ? words[i][w] : 0;
    }
  }

  TE_DIST_DEVICE float value(int run, int i) const {
    const int r = kAlongRows ? run : i, c = kAlongRows ? i : run;
    return Element::value(words[r][c / kPerWord], c % kPerWord);
  }

  TE_DIST_DEVICE bool has(int run) const { return kAlongRows ? rows.has(run) : cols.has(run); }

  // Largest magnitude of every run.
  TE_DIST_DEVICE void amax(float (&amax)[kRuns]) const {
    reduce<false>(amax);
  }

  // The same; not a number where a run has one that is not.
  TE_DIST_DEVICE void amax_or_nan(float (&amax)[kRuns]) const { reduce<true>(amax); }

  // Turns NaN into infinity, which has the same code but for the sign.
  TE_DIST_DEVICE void replace_nan() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[i][w] = Element::without_nan(words[i][w]);
    }
  }

  // Signs of the halves of each run.
  TE_DIST_DEVICE void find_signs(Signs (&signs)[kRuns][2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kPerWord == 1) {
#pragma unroll
        for (int run = 0; run < kRuns; ++run) signs[run][half] = each_sign(run, half);
      } else if constexpr (kAlongRows) {
#pragma unroll
        for (int run = 0; run < kRuns; ++run) signs[run][half] = Signs::of_words(&words[run][half * kWords / 2]);
      } else {
#pragma unroll
        for (int w = 0; w < kWords; ++w) signs_of_columns(w, half, signs[2 * w][half], signs[2 * w + 1][half]);
      }
    }
  }

 private:
  template <class Source, int kWidth>
  TE_DIST_DEVICE void read_any(const typename Source::Params& p, const Panel& panel, const Inside& rows,
                               const Inside& cols) {
    if constexpr (!Source::kIsComputed) {
      read<kWidth>(address(p), panel, rows, cols);
    } else if constexpr (kAlongRows) {
#pragma unroll
      for (int octet = 0; octet < kCols / kPatch; ++octet) {
        Octet<Element> found[kRows];
        const int first = octet * kPatch;
        typename Source::template Reader<kWidth> reader(p, panel.extents, row, col + first, seen_from(cols, first));
        reader.read(rows, found);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int w = 0; w < kWords / 2; ++w) words[i][octet * kWords / 2 + w] = found[i][w];
        }
      }
    } else {
      read_beside<Source, kWidth>(p, panel);
    }
  }

  template <class Params>
  TE_DIST_INLINE const void* address(const Params& p) {
    return p.x;
  }
  TE_DIST_INLINE const void* address(const typename Summed<Plain<Element>>::Params& p) { return p.source.x; }

  // From memory, where elements lie as they are.
  template <int kWidth>
  TE_DIST_DEVICE void read(const void* x, const Panel& panel, const Inside& rows, const Inside& cols) {
    constexpr int kBytes = kCols * Element::kBytes, kPiece = kWidth < kBytes ? kWidth : kBytes;
    const int64_t stride = panel.extents.cols * Element::kBytes;
    const char* next = static_cast<const char*>(x) + row * stride + col * Element::kBytes;
    const Inside inside = cols.scaled(Element::kBytes);
#pragma unroll
    for (int i = 0; i < kRows; ++i, next += stride) load_run<kBytes, kPiece>(next, inside.only_if(rows.has(i)), words[i]);
  }

  // Sources are read by eight columns: of those of two lanes, each reads the upper or lower eight rows, and they exchange
  // what is the other's.
  template <class Source, int kWidth>
  TE_DIST_DEVICE void read_beside(const typename Source::Params& p, const Panel& panel) {
    const bool is_right = threadIdx.x & 1;
    const int64_t first_row = row + (is_right ? kPatch : 0), first_col = col - (is_right ? kCols : 0);
    Octet<Element> found[kPatch];
    typename Source::template Reader<kWidth> reader(p, panel.extents, first_row, first_col,
                                                    Inside::of(first_col, kPatch, panel.extents.cols));
    reader.read(Inside::of(first_row, kPatch, panel.extents.rows), found);
    if constexpr (Source::kHasRowSums) reader.write_row_sums();
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t left = found[i][w], right = found[i][kWords + w];
        const uint32_t own = is_right ? right : left, given = is_right ? left : right;
        const uint32_t taken = __shfl_xor_sync(kFullWarp, given, 1);
        words[i][w] = is_right ? taken : own;
        words[kPatch + i][w] = is_right ? own : taken;
      }
    }
  }

  template <bool kNan>
  TE_DIST_INLINE uint32_t raised(uint32_t magnitudes, uint32_t word) {
    return kNan ? Element::raise_or_nan(magnitudes, word) : Element::raise(magnitudes, word);
  }

  template <bool kNan>
  TE_DIST_DEVICE void reduce(float (&amax)[kRuns]) const {
    uint32_t largest[kAlongRows ? kRuns : kWords] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        uint32_t& word = largest[kAlongRows ? i : w];
        word = raised<kNan>(word, words[i][w]);
      }
    }
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      if constexpr (kAlongRows) {
        amax[run] = kNan ? Element::largest_or_nan(largest[run]) : Element::largest(largest[run]);
      } else {
        amax[run] = fabsf(Element::value(largest[run / kPerWord], run % kPerWord));
      }
    }
  }

  TE_DIST_DEVICE Signs each_sign(int run, int half) const {
    uint32_t tops[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) tops[i] = bits_of(value(run, 8 * half + i)) >> 16;
    const uint32_t words[4] = {tops[0] | tops[1] << 16, tops[2] | tops[3] << 16, tops[4] | tops[5] << 16,
                               tops[6] | tops[7] << 16};
    return Signs::of_words(words);
  }

  // Of eight rows of the two columns of a word.
  TE_DIST_DEVICE void signs_of_columns(int w, int half, Signs& left, Signs& right) const {
    uint32_t pairs[4];  // of rows 0 and 2, 4 and 6, 1 and 3, 5 and 7: signs of the left column, then of the right
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = 8 * half + i / 2 + i % 2 * 4;
      pairs[i] = gathered(words[first][w], words[first + 2][w], 0x7351);
    }
    left = {gathered(pairs[0], pairs[1], 0xDC98), gathered(pairs[2], pairs[3], 0xDC98)};
    right = {gathered(pairs[0], pairs[1], 0xFEBA), gathered(pairs[2], pairs[3], 0xFEBA)};
  }
};

// A strip of columns with its elements in bf16.
template <class Element>
TE_DIST_INLINE Strip<BFloat16, false> in_bfloat16(const Strip<Element, false>& strip) {
  if constexpr (Element::kIsTopHalf) {
    return strip;
  } else {
    Strip<BFloat16, false> result(strip);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
#pragma unroll
      for (int w = 0; w < kRuns / 2; ++w) {
        result.words[i][w] = BFloat16::store_pair(strip.value(2 * w, i), strip.value(2 * w + 1, i));
      }
    }
    return result;
  }
}

}  // namespace te_dist::cuda
