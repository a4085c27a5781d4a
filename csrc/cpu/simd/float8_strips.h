// FP8 with a scale for every run of 128 in both directions, in one pass over the input. A strip is as high as a run and
// some runs wide. Its rows are quantized while they are copied close together, into the second-level cache; its
// columns, from that copy.
#pragma once

#include "float8_rows.h"
#include "panel.h"
#include "transpose.h"

namespace te_dist::cpu::TE_DIST_ISA {

constexpr int kStripRuns = 8, kStripCols = kStripRuns * kRun;
constexpr int kGroupRows = kBatch / kStripRuns;  // rows whose scales are found together

template <class Element_>
struct Strip {
  using Element = Element_;
  using Storage = typename Element::Storage;
  using Key = typename Element::Key;
  static constexpr int kStride = kStripCols + 64 / int(sizeof(Storage));  // rows start in different sets of the cache

  alignas(64) Storage elements[kRun][kStride];
  alignas(64) Key keys[kStripCols];  // of columns

  void load_row(const Source& x, const Window& w, int row) {
    if (w.cols < kStripCols) std::memset(elements[row], 0, sizeof elements[row]);
    if (row < w.row_offset || row >= w.row_offset + w.rows) {
      std::memset(elements[row], 0, sizeof elements[row]);
      return;
    }
    read_row<Element>(x, w.row + row - w.row_offset, w.col, w.cols, elements[row] + w.col_offset);
  }

  // 128 columns of the strip, as a panel.
  struct Columns {
    using Element = Element_;
    const Storage* first;
    const Storage* row(int r) const { return first + r * kStride; }
  };
  Columns columns(int run) const { return {elements[0] + run * kRun}; }
};

// A window of a strip, and where its runs lie in the matrix.
struct StripWindow {
  const QuantizeFloat8Block& op;
  Window w;

  int first_run() const { return w.col_offset / kRun; }
  int last_run() const { return (w.col_offset + w.cols - 1) / kRun; }
  bool has_row(int row) const { return row >= w.row_offset && row < w.row_offset + w.rows; }
  int64_t matrix_row(int row) const { return w.row + row - w.row_offset; }
  int64_t matrix_run(int run) const { return w.panel_col * kStripRuns + run; }
};

// Copies a row of the strip and finds the amaxes of its runs.
template <class Element>
void read_strip_row(const StripWindow& window, int row, Strip<Element>& strip, float* amax, bool* trusted) {
  const QuantizeFloat8Block& op = window.op;
  strip.load_row(op.x, window.w, row);
  raise_keys<Element>(strip.elements[row], kStripCols, strip.keys);
  if (!window.has_row(row)) return;
  for (int run = window.first_run(); run <= window.last_run(); ++run) {
    if (op.row.amax.data) {
      amax[run] = op.row.amax.at(window.matrix_row(row), window.matrix_run(run));
    } else {
      amax[run] = run_amax<Element, kRun>(strip.elements[row] + run * kRun, &trusted[run]);
    }
  }
}

// Encodes a run of a strip; where the matrix covers a part of it, that part.
template <class Element, class Code>
TE_DIST_INLINE void write_strip_run(const StripWindow& window, const typename Element::Storage* source, int row,
                                    int run, const RunScales& scales, int index) {
  const Window& w = window.w;
  const int col = run * kRun - w.col_offset;  // of the run's first element, in the window
  uint8_t* out = window.op.row.data + window.matrix_row(row) * window.op.x.cols + w.col + col;
  const float multiplier = scales.multipliers[index];
  const bool trusted = scales.trusted[index], pow2 = window.op.pow2;
  if (col < 0 || col + kRun > w.cols) {
    uint8_t codes[kRun];
    encode_run<Element, Code, Cached>(source, multiplier, trusted, pow2, codes);
    const int begin = col < 0 ? -col : 0, end = col + kRun < w.cols ? kRun : w.cols - col;
    std::memcpy(out + begin, codes + begin, size_t(end - begin));
  } else if (may_stream(window.op)) {
    encode_run<Element, Code, Streamed>(source, multiplier, trusted, pow2, out);
  } else {
    encode_run<Element, Code, Cached>(source, multiplier, trusted, pow2, out);
  }
}

// Quantizes the runs of all rows of a strip, and leaves a copy of it and the keys of its columns behind.
template <class Element, class Code>
void quantize_strip_rows(const StripWindow& window, const FloatScaleRule& rule, Strip<Element>& strip) {
  const QuantizeFloat8Block& op = window.op;
  const auto* x = static_cast<const typename Element::Storage*>(op.x.data) + window.w.col;
  std::memset(strip.keys, 0, sizeof strip.keys);
  for (int first = 0; first < kRun; first += kGroupRows) {
    RunScales scales;
    for (int i = 0; i < kGroupRows; ++i) {
      const int index = i * kStripRuns;
      read_strip_row(window, first + i, strip, scales.amax + index, scales.trusted + index);
    }
    scales.find(rule);
    for (int i = 0; i < kGroupRows; ++i) {
      const int row = first + i;
      if (!window.has_row(row)) continue;
      const auto* source = x + window.matrix_row(row) * op.x.cols;
      for (int run = window.first_run(); run <= window.last_run(); ++run) {
        const int index = i * kStripRuns + run;
        prefetch_run<Element>(source + run * kRun, kGroupRows * op.x.cols);
        write_strip_run<Element, Code>(window, strip.elements[row] + run * kRun, row, run, scales, index);
        op.row.scale.at(window.matrix_row(row), window.matrix_run(run)) = scales.inverses[index];
      }
    }
  }
}

// Amaxes of 128 columns from their keys. Says whether all elements are finite.
template <class Element>
bool column_amaxes(const Strip<Element>& strip, int run, float* amax) {
  using Key = typename Element::Key;
  Key keys[kRun], largest = 0;
  std::memcpy(keys, strip.keys + run * kRun, sizeof keys);
  for (int i = 0; i < kRun; ++i) largest = larger(largest, keys[i]);
  const bool finite = largest < Element::kNotFinite;
  if (!finite) {
    std::memset(keys, 0, sizeof keys);
    for (int r = 0; r < kRun; ++r) raise_finite_keys<Element>(strip.columns(run).row(r), kRun, keys);
  }
  for (int i = 0; i < kRun; ++i) amax[i] = Element::magnitude_of(keys[i]);
  return finite;
}

}  // namespace te_dist::cpu::TE_DIST_ISA
