// How a block of threads divides a panel of 128 x 128 elements into runs of 16: every thread holds four beside each other.
#pragma once

#include "butterfly.cuh"
#include "panels.cuh"
#include "source.cuh"

namespace te_dist::cuda {

constexpr int kRun = 16;
constexpr int kRuns = 4;

// Where as many panels lie side by side, a row of elements may have 2^32 bytes.
constexpr uint32_t kMostAcross = 1 << 23;

// How many panels lie side by side, and 2^32 divided by it, rounded down and below 2^32.
struct PanelGrid {
  uint32_t across, reciprocal;
};

// A panel of the grid. Panels are aligned to tiles, so the first begins before the matrix where it has a phase.
struct Panel : View {
  int64_t row, col;   // its first element in the matrix; may be negative
  Inside rows, cols;  // of the panel that lie in the matrix
  bool is_whole;      // all of it does, and bytes of a row of the matrix are counted in 32 bits

  // Rows, or columns, of the matrix from `first` on. A panel begins less than its extent before the matrix.
  template <class Panels>
  TE_DIST_INLINE Inside inside(int64_t first, int64_t extent) {
    const int64_t rest = extent - first;
    const int end = rest < kPanel ? int(rest) : kPanel;
    return {first < 0 ? -int(first) : 0, Panels::kIsGrouped && rest < 0 ? 0 : end};
  }

  // Number `index` of those from left to right, top to bottom.
  template <class Panels>
  TE_DIST_INLINE Panel of(const Extents& all, const Panels& panels, const PanelGrid& grid, uint32_t index) {
    uint32_t panel_row = __umulhi(index, grid.reciprocal), panel_col = index - panel_row * grid.across;
    if (panel_col >= grid.across) ++panel_row, panel_col -= grid.across;  // the quotient was that, or one less
    const View view = panels.view_of_tile(all, int(panel_row));
    const int64_t row = int64_t(panel_row) * kPanel - view.phase.row, col = int64_t(panel_col) * kPanel - view.phase.col;
    const Inside rows = inside<Panels>(row, view.extents.rows), cols = inside<Panels>(col, view.extents.cols);
    const int counted = grid.across < kMostAcross ? kPanel : 0;
    // One comparison: the compiler makes a predicate of every one wherever the result is used.
    const bool is_whole = (rows.begin | cols.begin | ((rows.end & cols.end & counted) ^ kPanel)) == 0;
    return {view, row, col, rows, cols, is_whole};
  }
};

// Factors that the compiler does not know: it would add numbers of 64 bits instead of multiplying and adding at once.
__constant__ uint32_t kSteps[] = {1, 2, 4, 8};

// Addresses `stride` bytes behind each other.
template <int kCount>
struct Addresses {
  char* at[kCount];

  TE_DIST_DEVICE Addresses(char* first, uint32_t stride) {
    // The same in every thread, unknown to the compiler: it would multiply once for all, and add by two instructions in each.
    const uint32_t own = min(stride + threadIdx.x, stride);
    at[0] = first;
#pragma unroll
    for (int i = 1; i < kCount; ++i) {
      const int bit = (i > 1) + (i > 3) + (i > 7);
      at[i] = at[i - (1 << bit)] + uint64_t(own) * kSteps[bit];
    }
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

// Byte j of word i becomes byte i of word j.
TE_DIST_INLINE void turn_bytes(const uint32_t (&words)[4], uint32_t (&turned)[4]) {
  const uint32_t low[2] = {gathered(words[0], words[1], 0x5140), gathered(words[2], words[3], 0x5140)};
  const uint32_t high[2] = {gathered(words[0], words[1], 0x7362), gathered(words[2], words[3], 0x7362)};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    turned[j] = gathered(low[0], low[1], j ? 0x7632 : 0x5410);
    turned[2 + j] = gathered(high[0], high[1], j ? 0x7632 : 0x5410);
  }
}

// The bytes of the first of two words; the compiler does not know which these are.
__constant__ uint32_t kAllOfFirst = 0x3210;

// Signs of eight elements: of every second one, as bytes all of whose bits are the sign.
struct Signs {
  uint32_t even, odd;

  // Of 16-bit elements in four words.
  TE_DIST_INLINE Signs of_words(const uint32_t* words) {
    const uint32_t low = gathered(words[0], words[1], 0x7531), high = gathered(words[2], words[3], 0x7531);
    return {gathered(low, high, 0xECA8), gathered(low, high, 0xFDB9)};
  }

  // With eight magnitudes in the nibbles of a word, whose highest bits are clear; or are not, and are replaced.
  template <bool kAreClear>
  TE_DIST_DEVICE uint32_t joined(uint32_t magnitudes) const {
    const uint32_t with_even = (even & 0x08080808u) | (kAreClear ? magnitudes : magnitudes & 0x77777777u);
    return (odd & 0x80808080u) | with_even;
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

  const Panel& panel;
  int local_row, local_col;  // of its first element in the panel
  uint32_t words[kRows][kWords];

  TE_DIST_DEVICE explicit Strip(const Panel& panel) : panel(panel) {
    const int lane = threadIdx.x % 32;
    local_row = threadIdx.x / 32 * kRun + lane / kLanesAcross * kRows;
    local_col = lane % kLanesAcross * kCols;
  }

  // In the same place.
  template <class Other>
  TE_DIST_DEVICE explicit Strip(const Strip<Other, kAlongRows>& other)
      : panel(other.panel), local_row(other.local_row), local_col(other.local_col) {}

  // Of its first element in the matrix; and counted from there, what lies in the matrix.
  TE_DIST_DEVICE int64_t row() const { return panel.row + local_row; }
  TE_DIST_DEVICE int64_t col() const { return panel.col + local_col; }
  TE_DIST_DEVICE Inside rows() const { return seen_from(panel.rows, local_row); }
  TE_DIST_DEVICE Inside cols() const { return seen_from(panel.cols, local_col); }

  // kWidth: bytes that every address is a multiple of. What lies outside of the matrix is zero.
  template <class Source, int kWidth>
  TE_DIST_DEVICE void load(const typename Source::Params& p) {
    // What is computed is long: instructions for whole panels alone would not fit beside the others in their cache.
    if constexpr (Source::kIsComputed) {
      compute<Source, kWidth>(p);
    } else if (panel.is_whole) {
      read_whole<kWidth>(address(p));
    } else {
      read<kWidth>(address(p));
    }
  }

  // Byte of the strip in a panel that is whole: rows are `pitch` bytes, of which kShare elements have kBytes.
  template <int kBytes, int kShare = 1>
  TE_DIST_DEVICE uint64_t byte_in(uint32_t pitch) const {
    uint64_t of_panel = uint64_t(panel.row) * pitch + uint64_t(panel.col) * kBytes / kShare;
    // Otherwise the compiler adds up rows and columns first, and multiplies numbers of 64 bits in every thread.
    asm("" : "+l"(of_panel));
    return of_panel + uint64_t(pitch) * uint32_t(local_row) + uint32_t(local_col * kBytes / kShare);
  }

  // Rows that are outside become zeros.
  TE_DIST_DEVICE void keep_rows() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[i][w] = rows().has(i) ? words[i][w] : 0;
    }
  }

  TE_DIST_DEVICE float value(int run, int i) const { return value(words, run, i); }
  // Of words like these.
  TE_DIST_INLINE float value(const uint32_t (&words)[kRows][kWords], int run, int i) {
    const int r = kAlongRows ? run : i, c = kAlongRows ? i : run;
    return Element::value(words[r][c / kPerWord], c % kPerWord);
  }

  TE_DIST_DEVICE bool has(int run) const { return kAlongRows ? rows().has(run) : cols().has(run); }

  // Largest magnitude of every run.
  TE_DIST_DEVICE void amax(float (&amax)[kRuns]) const {
    reduce<false>(amax);
  }

  // The same, with any sign; not a number where a run has one that is not.
  TE_DIST_DEVICE void amax_or_nan(float (&amax)[kRuns]) const { reduce<true>(amax); }

  // Turns NaN into infinity, which has the same code but for the sign.
  TE_DIST_DEVICE void replace_nan() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[i][w] = Element::without_nan(words[i][w]);
    }
  }

  // Elements are taken out of their words again: the compiler would keep all of them, in more registers than there are.
  TE_DIST_DEVICE void pack() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) asm("" : "+r"(words[i][w]));
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
  TE_DIST_DEVICE void compute(const typename Source::Params& p) {
    if constexpr (kAlongRows) {
#pragma unroll
      for (int octet = 0; octet < kCols / kPatch; ++octet) {
        Octet<Element> found[kRows];
        const int first = octet * kPatch;
        typename Source::template Reader<kWidth> reader(p, panel.extents, row(), col() + first, seen_from(cols(), first));
        reader.read(rows(), found);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int w = 0; w < kWords / 2; ++w) words[i][octet * kWords / 2 + w] = found[i][w];
        }
      }
    } else {
      read_beside<Source, kWidth>(p);
    }
  }

  template <class Params>
  TE_DIST_INLINE const void* address(const Params& p) {
    return p.x;
  }
  TE_DIST_INLINE const void* address(const typename Summed<Plain<Element>>::Params& p) { return p.source.x; }

  static constexpr int kBytes = kCols * Element::kBytes;  // of a row

  // From memory, where elements lie as they are.
  template <int kWidth>
  TE_DIST_DEVICE void read(const void* x) {
    const int64_t stride = panel.extents.cols * Element::kBytes;
    const char* next = static_cast<const char*>(x) + row() * stride + col() * Element::kBytes;
    const Inside inside = cols().scaled(Element::kBytes), rows = this->rows();
#pragma unroll
    for (int i = 0; i < kRows; ++i, next += stride) {
      load_run<kBytes, (kWidth < kBytes ? kWidth : kBytes)>(next, inside.only_if(rows.has(i)), words[i]);
    }
  }

  template <int kWidth>
  TE_DIST_DEVICE void read_whole(const void* x) {
    const uint32_t stride = uint32_t(panel.extents.cols) * Element::kBytes;
    const Addresses<kRows> rows(static_cast<char*>(const_cast<void*>(x)) + byte_in<Element::kBytes>(stride), stride);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      load_run<kBytes, (kWidth < kBytes ? kWidth : kBytes)>(rows.at[i], {0, kBytes}, words[i]);
    }
  }

  // Sources are read by eight columns: of those of two lanes, each reads the upper or lower eight rows, and they exchange
  // what is the other's.
  template <class Source, int kWidth>
  TE_DIST_DEVICE void read_beside(const typename Source::Params& p) {
    const bool is_right = threadIdx.x & 1;
    const int64_t first_row = row() + (is_right ? kPatch : 0), first_col = col() - (is_right ? kCols : 0);
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
        const bool is_first = (kAlongRows ? w : i) == 0;
        word = kNan && is_first ? words[i][w] : raised<kNan>(word, words[i][w]);
      }
    }
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      if constexpr (kAlongRows) {
        amax[run] = kNan ? Element::largest_or_nan(largest[run]) : Element::largest(largest[run]);
      } else {
        amax[run] = Element::value(largest[run / kPerWord], run % kPerWord);
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
