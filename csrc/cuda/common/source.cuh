// Where a kernel's matrix comes from: from memory as it lies there, or computed from what lies there and rounded to the
// element type, as if it had been written and read again.
//
// A source is a type with an Element, with Params, and with a Reader<kWidth> that goes down the rows of eight columns.
// kWidth: bytes that every address is a multiple of. kIsComputed: it takes registers for more than the elements.
// kHasSums, kHasRowSums: columns, or rows, are summed on the way, over panels of kPanel rows, or columns. kIsPaired: panels
// of the left half are read with those as far in the right half, of columns that are whole panels.
#pragma once

#include "../../numerics/activation.h"
#include "patch.cuh"

namespace te_dist::cuda {

// Eight elements of a row.
template <class Element>
using Octet = uint32_t[kPatch / Element::kPerWord];

// Words of elements from their values: `value(w, half)` is the one in that half of word w.
template <class Element, class Value>
TE_DIST_INLINE void store_values(Octet<Element>& words, const Value& value) {
#pragma unroll
  for (int w = 0; w < kPatch / Element::kPerWord; ++w) {
    if constexpr (Element::kPerWord == 1) {
      words[w] = bits_of(value(w, 0));
    } else {
      words[w] = Element::store_pair(value(w, 0), value(w, 1));
    }
  }
}

// Eight elements of each row of a matrix, row after row.
template <class Element, int kWidth>
struct Column {
  const char* next;
  int64_t stride;
  Inside cols;  // in bytes

  TE_DIST_INLINE Column of(const void* data, const Extents& extents, int64_t row, int64_t col, const Inside& cols) {
    const int64_t first = (row * extents.cols + col) * Element::kBytes;
    return {static_cast<const char*>(data) + first, extents.cols * Element::kBytes, cols.scaled(Element::kBytes)};
  }

  // Those of the next rows; zeros where the matrix has none.
  template <int kRows>
  TE_DIST_DEVICE void read(const Inside& rows, Octet<Element> (&words)[kRows]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i, next += stride) {
      load_run<kPatch * Element::kBytes, kWidth>(next, cols.only_if(rows.has(i)), words[i]);
    }
  }
};

// Elements as they lie in memory, (rows, cols).
template <class Element_>
struct Plain {
  using Element = Element_;
  static constexpr bool kIsComputed = false, kHasSums = false, kHasRowSums = false, kIsPaired = false;

  struct Params {
    const void* x;
  };

  template <int kWidth>
  struct Reader {
    Column<Element, kWidth> x;

    TE_DIST_DEVICE Reader(const Params& p, const Extents& extents, int64_t row, int64_t col, const Inside& cols)
        : x(Column<Element, kWidth>::of(p.x, extents, row, col, cols)) {}

    template <int kRows>
    TE_DIST_DEVICE void read(const Inside& rows, Octet<Element> (&words)[kRows]) {
      x.read(rows, words);
    }
  };
};

// What rows are multiplied by: nothing, or probabilities, f32 (rows,); or these, by which a gradient is found as well.
enum class Routing { kNone, kWeighted, kDifferentiated };

template <Routing>
struct Routed {
  template <int kRows>
  TE_DIST_DEVICE void weights(int64_t, const Inside&, float (&weights)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) weights[i] = 1.0f;
  }
};
template <>
struct Routed<Routing::kWeighted> {
  const float* probability;

  // Of rows from `row` on, 0 where they are not inside.
  template <int kRows>
  TE_DIST_DEVICE void weights(int64_t row, const Inside& inside, float (&weights)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) weights[i] = inside.has(i) ? __ldg(probability + row + i) : 0.0f;
  }
};
template <>
struct Routed<Routing::kDifferentiated> : Routed<Routing::kWeighted> {
  float* row_sums;  // (panels of columns, rows)
  int64_t rows;
};

// silu(gate) * up, of x (rows, 2 cols): gates to the left.
template <class Element_, Routing kRouting>
struct SwiGlu {
  using Element = Element_;
  static constexpr bool kIsComputed = true, kHasSums = false, kHasRowSums = false, kIsPaired = false;

  struct Params : Routed<kRouting> {
    const void* x;
  };

  template <int kWidth>
  struct Reader {
    const Params& p;
    int64_t row;
    Column<Element, kWidth> gate, up;

    TE_DIST_DEVICE Reader(const Params& p_, const Extents& extents, int64_t row_, int64_t col, const Inside& cols)
        : p(p_), row(row_),
          gate(Column<Element, kWidth>::of(p.x, {extents.rows, 2 * extents.cols}, row, col, cols)),
          up(Column<Element, kWidth>::of(p.x, {extents.rows, 2 * extents.cols}, row, extents.cols + col, cols)) {}

    template <int kRows>
    TE_DIST_DEVICE void read(const Inside& rows, Octet<Element> (&words)[kRows]) {
      Octet<Element> gates[kRows], ups[kRows];
      float weights[kRows];
      p.weights(row, rows, weights);
      gate.read(rows, gates);
      up.read(rows, ups);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        store_values<Element>(words[i], [&](int w, int half) {
          return swiglu(Element::value(gates[i][w], half), Element::value(ups[i][w], half)) * weights[i];
        });
      }
      row += kRows;
    }
  };
};

// The gradient of swiglu by x (rows, cols), from grad (rows, cols / 2). What is found of the probabilities' is the sum of
// grad * swiglu over each panel of columns: from left to right over 8 columns; 16 such sums are folded in halves.
// kIsPaired_: gates and ups of the same columns are read together, which computes the sigmoid once, not twice.
template <class Element_, Routing kRouting, bool kIsPaired_ = false>
struct SwiGluGradient {
  using Element = Element_;
  static constexpr bool kIsComputed = true, kHasSums = false, kHasRowSums = kRouting == Routing::kDifferentiated;
  static constexpr bool kIsPaired = kIsPaired_;

  struct Params : Routed<kRouting> {
    const void* x;
    const void* grad;
  };

  // Number `w` of the words of eight columns, of which the first `count` are found in `left`, the others in `right`.
  TE_DIST_INLINE uint32_t joined(int w, int count, uint32_t left, uint32_t right) {
    if constexpr (Element::kPerWord == 1) return w < count ? left : right;
    const uint32_t mask = (2 * w < count ? 0x0000FFFFu : 0u) | (2 * w + 1 < count ? 0xFFFF0000u : 0u);
    return (left & mask) | (right & ~mask);
  }

  // Of the eight columns some may be gates and the rest ups.
  template <int kWidth>
  struct Reader {
    const Params& p;
    Extents extents, half;  // of x and of grad
    int64_t row, col;
    float sums[kHasRowSums ? kPatch : 1];  // of the rows read last

    TE_DIST_DEVICE Reader(const Params& p_, const Extents& extents_, int64_t row_, int64_t col_, const Inside&)
        : p(p_), extents(extents_), half{extents_.rows, extents_.cols / 2}, row(row_), col(col_) {}

    template <int kRows>
    TE_DIST_DEVICE void read(const Inside& rows, Octet<Element> (&words)[kRows]) {
      if constexpr (kHasRowSums) fill(sums, 0.0f);
      const Inside gates = Inside::of(col, kPatch, half.cols), ups = Inside::of(col - half.cols, kPatch, half.cols);
      Octet<Element> g[kRows], x[kRows], y[kRows];
      float weights[kRows];
      p.weights(row, rows, weights);
#pragma unroll
      for (int i = 0; i < kRows; ++i) store_values<Element>(words[i], [](int, int) { return 0.0f; });
      if (!gates.is_empty()) {
        read_from(p.grad, half, col, gates, rows, g);
        read_from(p.x, extents, col, gates, rows, x);
        read_from(p.x, extents, half.cols + col, gates, rows, y);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          store_values<Element>(words[i], [&](int w, int h) {
            return swiglu_gradient_of_gate(Element::value(g[i][w], h) * weights[i], Element::value(x[i][w], h),
                                           Element::value(y[i][w], h));
          });
          if constexpr (kHasRowSums) sums[i] = sum_of_products(g[i], x[i], y[i]);
        }
      }
      if (!ups.is_empty()) {
        Octet<Element> found[kRows];
        read_from(p.grad, half, col - half.cols, ups, rows, g);
        read_from(p.x, extents, col - half.cols, ups, rows, x);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          store_values<Element>(found[i], [&](int w, int h) {
            return swiglu_gradient_of_up(Element::value(g[i][w], h) * weights[i], Element::value(x[i][w], h));
          });
#pragma unroll
          for (int w = 0; w < kPatch / Element::kPerWord; ++w) words[i][w] = joined(w, gates.end, words[i][w], found[i][w]);
        }
      }
      row += kRows;
    }

    // Those by the gates, and those by the ups of the same columns; of a few rows at a time, for which there are registers.
    template <int kRows>
    TE_DIST_DEVICE void read(const Inside& rows, Octet<Element> (&by_gate)[kRows], Octet<Element> (&by_up)[kRows]) {
      constexpr int kStep = 4;
      const Inside all{0, kPatch};
      auto grad = Column<Element, kWidth>::of(p.grad, half, row, col, all);
      auto gate = Column<Element, kWidth>::of(p.x, extents, row, col, all);
      auto up = Column<Element, kWidth>::of(p.x, extents, row, half.cols + col, all);
      float weights[kRows];
      p.weights(row, rows, weights);
#pragma unroll
      for (int first = 0; first < kRows; first += kStep) {
        Octet<Element> g[kStep], x[kStep], y[kStep];
        const Inside inside{rows.begin - first, rows.end - first};
        grad.read(inside, g);
        gate.read(inside, x);
        up.read(inside, y);
#pragma unroll
        for (int k = 0; k < kStep; ++k) {
          const int i = first + k;
          if constexpr (kHasRowSums) sums[i] = sum_of_products(g[k], x[k], y[k]);
          store_values<Element>(by_gate[i], [&](int w, int h) {
            return swiglu_gradient_of_gate(Element::value(g[k][w], h) * weights[i], Element::value(x[k][w], h),
                                           Element::value(y[k][w], h));
          });
          store_values<Element>(by_up[i], [&](int w, int h) {
            return swiglu_gradient_of_up(Element::value(g[k][w], h) * weights[i], Element::value(x[k][w], h));
          });
        }
      }
      row += kRows;
    }

    // Of the eight rows read last; the lanes of a warp have read 16 rows of a panel, as `SquareLanes` says.
    TE_DIST_DEVICE void write_row_sums() {
      using Rows = SharedOut<16, 8, 4, 2>;
      const int64_t panel = col / kPanel, target = row - kPatch + Rows::first();
      if (panel * kPanel >= half.cols) return;
      float owned[Rows::kOwned];
      Rows::sum(sums, owned);
      if (Rows::writes() && target >= 0 && target < half.rows) p.row_sums[panel * p.rows + target] = owned[0];
    }

   private:
    TE_DIST_INLINE float sum_of_products(const Octet<Element>& g, const Octet<Element>& x, const Octet<Element>& y) {
      float sum;
#pragma unroll
      for (int j = 0; j < kPatch; ++j) {
        const int w = j / Element::kPerWord, h = j % Element::kPerWord;
        const float product = Element::value(g[w], h) * swiglu(Element::value(x[w], h), Element::value(y[w], h));
        sum = j ? sum + product : product;
      }
      return sum;
    }

    template <int kRows>
    TE_DIST_DEVICE void read_from(const void* data, const Extents& of, int64_t first, const Inside& cols,
                                  const Inside& rows, Octet<Element> (&words)[kRows]) const {
      Column<Element, kWidth>::of(data, of, row, first, cols).read(rows, words);
    }
  };
};

// x * rstd * gamma, one rstd (f32) for each row; gamma counts from 1 where kZeroCentered.
template <class Element_, class Gamma, bool kZeroCentered>
struct RmsNorm {
  using Element = Element_;
  static constexpr bool kIsComputed = true, kHasSums = false, kHasRowSums = false, kIsPaired = false;

  struct Params {
    const void* x;
    const float* rstd;
    const void* gamma;
  };

  template <int kWidth>
  struct Reader {
    static constexpr int kGammaBytes = kWidth / Element::kBytes * Gamma::kBytes;
    Column<Element, kWidth> x;
    const float* rstd;
    float gamma[kPatch];

    TE_DIST_DEVICE Reader(const Params& p, const Extents& extents, int64_t row, int64_t col, const Inside& cols)
        : x(Column<Element, kWidth>::of(p.x, extents, row, col, cols)), rstd(p.rstd + row) {
      Octet<Gamma> words;
      load_run<kPatch * Gamma::kBytes, (kGammaBytes < 16 ? kGammaBytes : 16)>(
          static_cast<const char*>(p.gamma) + col * Gamma::kBytes, cols.scaled(Gamma::kBytes), words);
#pragma unroll
      for (int j = 0; j < kPatch; ++j) {
        const float value = Gamma::value(words[j / Gamma::kPerWord], j % Gamma::kPerWord);
        gamma[j] = kZeroCentered ? value + 1.0f : value;
      }
    }

    template <int kRows>
    TE_DIST_DEVICE void read(const Inside& rows, Octet<Element> (&words)[kRows]) {
      Octet<Element> read[kRows];
      x.read(rows, read);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float scale = rows.has(i) ? __ldg(rstd + i) : 0.0f;
        store_values<Element>(words[i], [&](int w, int half) {
          return Element::value(read[i][w], half) * scale * gamma[w * Element::kPerWord + half];
        });
      }
      rstd += kRows;
    }
  };
};

// Rows of another source, in the order of `index`. A row whose number is outside of that source is zeros.
template <class Source, class Index>
struct Gathered {
  using Element = typename Source::Element;
  static constexpr bool kIsComputed = true, kHasSums = false, kHasRowSums = false, kIsPaired = false;

  struct Params {
    typename Source::Params source;
    const Index* index;
    int64_t rows;  // of the other source
  };

  template <int kWidth>
  struct Reader {
    const Params& p;
    const Index* index;
    int64_t num_cols, col;
    Inside cols;

    TE_DIST_DEVICE Reader(const Params& p_, const Extents& extents, int64_t row, int64_t col_, const Inside& cols_)
        : p(p_), index(p_.index + row), num_cols(extents.cols), col(col_), cols(cols_) {}

    template <int kRows>
    TE_DIST_DEVICE void read(const Inside& rows, Octet<Element> (&words)[kRows]) {
      Index numbers[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) numbers[i] = rows.has(i) ? __ldg(index + i) : -1;
      // All numbers are asked for before the first is waited for.
#pragma unroll
      for (int i = 0; i < kRows; ++i) keep(numbers[i]);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool is_inside = uint64_t(numbers[i]) < uint64_t(p.rows);
        Octet<Element> found[1];
        const int64_t row = is_inside ? numbers[i] : 0;
        typename Source::template Reader<kWidth> reader(p.source, {p.rows, num_cols}, row, col, cols);
        reader.read({0, is_inside}, found);
#pragma unroll
        for (int w = 0; w < kPatch / Element::kPerWord; ++w) words[i][w] = is_inside ? found[0][w] : 0;
      }
      index += kRows;
    }

   private:
    TE_DIST_INLINE void keep(int32_t& number) { asm volatile("" : "+r"(number)); }
    TE_DIST_INLINE void keep(int64_t& number) { asm volatile("" : "+l"(number)); }
  };
};

// Another source, whose columns are summed over each panel of 128 rows as they pass, in fp32. Every column is summed from
// row to row over 8 rows; two such sums are added; eight of those are added from top to bottom, to +0.
template <class Source>
struct Summed {
  using Element = typename Source::Element;
  static constexpr bool kIsComputed = Source::kIsComputed, kHasSums = true, kHasRowSums = Source::kHasRowSums;
  static constexpr bool kIsPaired = false;

  struct Params {
    typename Source::Params source;
    float* sums;  // (panels, cols)
  };

  template <int kWidth>
  struct Reader : Source::template Reader<kWidth> {
    TE_DIST_DEVICE Reader(const Params& p, const Extents& extents, int64_t row, int64_t col, const Inside& cols)
        : Source::template Reader<kWidth>(p.source, extents, row, col, cols) {}
  };

  // An element of a patch, unpacked by another instruction than is used behind: a compiler that finds the same one there
  // keeps every value in a register until then.
  TE_DIST_INLINE float summand(const Patch<Element>& patch, int row, int col) {
    if constexpr (Element::kIsTopHalf) {
      return float_of(__byte_perm(patch.words[row][col / 2], 0, col % 2 ? 0x3244 : 0x1044));
    } else {
      return patch.value(row, col);
    }
  }

  TE_DIST_INLINE void sum(const Params& p, const Place& place, const Patch<Element>& patch) {
    __shared__ float partial[kWarps][kPanel];
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      float total = summand(patch, 0, j);
#pragma unroll
      for (int i = 1; i < kPatch; ++i) total += summand(patch, i, j);
      total += __shfl_xor_sync(kFullWarp, total, 1);
      if ((threadIdx.x & 1) == 0) partial[threadIdx.x / 32][place.local_col + j] = total;
    }
    __syncthreads();
    const int64_t col = place.first_col() + threadIdx.x;
    if (threadIdx.x < kPanel && col >= 0 && col < place.extents.cols) {
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += partial[w][threadIdx.x];
      p.sums[place.panel_row * place.extents.cols + col] = total;
    }
  }
};

// Reads a patch. What lies outside of the matrix is zero; where it is padded, even if a source makes more of zeros.
template <class Source, int kWidth, bool kIsPadded = false>
TE_DIST_INLINE void load_patch(const typename Source::Params& p, const Place& place,
                               Patch<typename Source::Element>& patch) {
  typename Source::template Reader<kWidth> reader(p, place.extents, place.row, place.col, place.cols);
  reader.read(place.rows, patch.words);
  if constexpr (Source::kHasRowSums) reader.write_row_sums();
  if constexpr (kIsPadded && Source::kIsComputed) patch.keep_rows(place.rows);
  if constexpr (Source::kHasSums) Source::sum(p, place, patch);
}

// Calls `use` with a place and the patch there, one after the other of a pair, both read before.
template <class Source, int kWidth, bool kIsPadded, class Lanes, class Use>
TE_DIST_INLINE void with_pair(const typename Source::Params& p, const Place& place, const Use& use) {
  const Place beside = place.template moved<Lanes>(place.extents.cols / 2);
  Patch<typename Source::Element> left, right;
  typename Source::template Reader<kWidth> reader(p, place.extents, place.row, place.col, place.cols);
  reader.read(place.rows, left.words, right.words);
  if constexpr (Source::kHasRowSums) reader.write_row_sums();
  if constexpr (kIsPadded) left.keep_rows(place.rows), right.keep_rows(place.rows);
  use(place, left);
  __syncthreads();  // what threads share has been read
  use(beside, right);
}

}  // namespace te_dist::cuda
