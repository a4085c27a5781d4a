// What sources compute, and what is found from a whole one: the matrix itself, sums of its columns, norms of its rows.
#include "source.h"

#include <initializer_list>

#include "../../numerics/activation.h"
#include "kernels_of_level.h"
#include "parallel.h"

namespace te_dist::cpu::TE_DIST_ISA {
namespace {

// Elements of a row as fp32, a vector at a time; behind the last one come zeros.
template <class Element>
struct Row {
  const typename Element::Storage* elements;
  int64_t count;

  F32 at(int64_t i) const {
    if (i + kLanes <= count) return Element::load_lanes(elements + i);
    typename Element::Storage padded[kLanes] = {};
    if (i < count) std::memcpy(padded, elements + i, sizeof padded[0] * size_t(count - i));
    return Element::load_lanes(padded);
  }
};

template <class Element>
Row<Element> row_of(const void* data, int64_t first, int64_t count) {
  return {static_cast<const typename Element::Storage*>(data) + first, count};
}

// NaN as GPUs have it.
template <class Floats>
Floats canonical(Floats values) {
  return values == values ? values : float_of(all<IntegersOf<Floats>>(0x7FFFFFFFu));
}

// out[i] = value(i), `kLanes` at a time.
template <class Element, class Value>
void store_row(int64_t count, typename Element::Storage* out, const Value& value) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const F32 values = canonical(value(i));
    if (i + kLanes <= count) {
      Element::store_lanes(out + i, values);
    } else {
      typename Element::Storage padded[kLanes];
      Element::store_lanes(padded, values);
      std::memcpy(out + i, padded, sizeof padded[0] * size_t(count - i));
    }
  }
}

float weight_of(const Source& x, int64_t row) { return x.probability ? x.probability[row] : 1.0f; }

template <class Element>
void compute_swiglu(const Source& x, int64_t row, int64_t col, int64_t count, typename Element::Storage* out) {
  const int64_t first = row * 2 * x.cols + col;
  const auto gates = row_of<Element>(x.data, first, count), ups = row_of<Element>(x.data, first + x.cols, count);
  const float weight = weight_of(x, row);
  store_row<Element>(count, out, [&](int64_t i) { return swiglu(gates.at(i), ups.at(i)) * weight; });
}

template <class Element>
void compute_swiglu_gradient(const Source& x, int64_t row, int64_t col, int64_t count,
                             typename Element::Storage* out) {
  const int64_t half = x.cols / 2, end = col + count;
  const float weight = weight_of(x, row);
  if (col < half) {
    const int64_t first = row * x.cols + col, length = (end < half ? end : half) - col;
    const auto grads = row_of<Element>(x.beside, row * half + col, length);
    const auto gates = row_of<Element>(x.data, first, length), ups = row_of<Element>(x.data, first + half, length);
    store_row<Element>(length, out,
                       [&](int64_t i) { return swiglu_gradient_of_gate(grads.at(i) * weight, gates.at(i), ups.at(i)); });
  }
  if (end > half) {
    const int64_t begin = col > half ? col : half, length = end - begin;
    const auto grads = row_of<Element>(x.beside, row * half + begin - half, length);
    const auto gates = row_of<Element>(x.data, row * x.cols + begin - half, length);
    store_row<Element>(length, out + begin - col,
                       [&](int64_t i) { return swiglu_gradient_of_up(grads.at(i) * weight, gates.at(i)); });
  }
}

template <class Element>
void compute_rms_norm(const Source& x, int64_t row, int64_t col, int64_t count, typename Element::Storage* out) {
  const auto values = row_of<Element>(x.data, row * x.cols + col, count);
  const float rstd = static_cast<const float*>(x.beside)[row];
  with_element(x.gamma.dtype, [&](auto element) {
    const auto gammas = row_of<decltype(element)>(x.gamma.data, col, count);
    store_row<Element>(count, out, [&](int64_t i) {
      const F32 gamma = gammas.at(i);
      return values.at(i) * rstd * (x.kind == Source::Kind::kZeroCenteredRmsNorm ? gamma + 1.0f : gamma);
    });
  });
}

}  // namespace

template <class Element>
void compute_row(const Source& x, int64_t row, int64_t col, int64_t count, typename Element::Storage* out) {
  using Storage = typename Element::Storage;
  row = x.index.of(row);
  if (row < 0) {
    std::memset(out, 0, sizeof(Storage) * size_t(count));
    return;
  }
  if (x.kind == Source::Kind::kPlain) {
    std::memcpy(out, static_cast<const Storage*>(x.data) + row * x.cols + col, sizeof(Storage) * size_t(count));
    return;
  }
  if (x.kind == Source::Kind::kSwiGlu) return compute_swiglu<Element>(x, row, col, count, out);
  if (x.kind == Source::Kind::kSwiGluGradient) return compute_swiglu_gradient<Element>(x, row, col, count, out);
  compute_rms_norm<Element>(x, row, col, count, out);
}

template void compute_row<Float32>(const Source&, int64_t, int64_t, int64_t, float*);
template void compute_row<BFloat16>(const Source&, int64_t, int64_t, int64_t, uint16_t*);
template void compute_row<Float16>(const Source&, int64_t, int64_t, int64_t, uint16_t*);

void evaluate(const Evaluate& op, int threads) {
  with_element(op.x.dtype, [&](auto element) {
    using Element = decltype(element);
    parallel_for(op.x.cols ? op.x.rows : 0, threads, [&](int64_t row) {
      auto* out = static_cast<typename Element::Storage*>(op.out) + row * op.x.cols;
      read_row<Element>(op.x, row, 0, op.x.cols, out);
    });
  });
}

namespace {

constexpr int kPanelRows = 128, kPatchRows = 8;
constexpr int kColumns = 1024;  // summed at a time

// Sums of columns over a panel, in the order that csrc/cuda/common/source.cuh defines. Rows that are not there add +0.
template <class Element>
struct PanelSums {
  alignas(64) typename Element::Storage elements[kColumns];
  alignas(64) float patch[2][kColumns], total[kColumns];

  // Of eight rows, from row to row.
  void sum_patch(const Source& x, int64_t first, int64_t col, int count, float* sums) {
    std::memset(sums, 0, sizeof patch[0]);
    for (int64_t row = first; row < first + kPatchRows && row < x.rows; ++row) {
      read_row<Element>(x, row, col, count, elements);
      for (int i = 0; i < count; i += kLanes) store(sums + i, load<F32>(sums + i) + Element::load_lanes(elements + i));
    }
  }

  void sum(const Source& x, int64_t first, int64_t col, int count, float* out) {
    std::memset(total, 0, sizeof total);
    std::memset(elements, 0, sizeof elements);
    for (int r = 0; r < kPanelRows; r += 2 * kPatchRows) {
      sum_patch(x, first + r, col, count, patch[0]);
      sum_patch(x, first + r + kPatchRows, col, count, patch[1]);
      for (int i = 0; i < count; i += kLanes) {
        store(total + i, load<F32>(total + i) + (load<F32>(patch[0] + i) + load<F32>(patch[1] + i)));
      }
    }
    store_row<Float32>(count, out, [&](int64_t i) { return load<F32>(total + i); });
  }
};

}  // namespace

void panel_sums(const ColumnSums& op, int threads) {
  const int64_t panels = (op.x.rows + kPanelRows - 1) / kPanelRows, strips = (op.x.cols + kColumns - 1) / kColumns;
  with_element(op.x.dtype, [&](auto element) {
    parallel_for(panels * strips, threads, [&](int64_t index) {
      PanelSums<decltype(element)> sums;
      const int64_t panel = index / strips, col = index % strips * kColumns;
      const int count = int(op.x.cols - col < kColumns ? op.x.cols - col : kColumns);
      sums.sum(op.x, panel * kPanelRows, col, count, op.out + panel * op.x.cols + col);
    });
  });
}

namespace {

constexpr int kPanelCols = 128, kOctet = 8;

// Of grad * swiglu over up to 128 columns, in the order that csrc/cuda/common/source.cuh defines.
template <class Element>
float sum_of_products(const Row<Element>& grads, const Row<Element>& gates, const Row<Element>& ups) {
  alignas(64) float products[kPanelCols];
  float sums[kPanelCols / kOctet];
  for (int i = 0; i < kPanelCols; i += kLanes) store(products + i, grads.at(i) * swiglu(gates.at(i), ups.at(i)));
  for (int octet = 0; octet < kPanelCols / kOctet; ++octet) {
    sums[octet] = products[octet * kOctet];
    for (int i = 1; i < kOctet; ++i) sums[octet] += products[octet * kOctet + i];
  }
  for (int half = kPanelCols / kOctet / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

}  // namespace

void row_sums(const RowSums& op, int threads) {
  const Source& x = op.x;
  const int64_t half = x.cols / 2;
  with_element(x.dtype, [&](auto element) {
    using Element = decltype(element);
    parallel_for(x.rows, threads, [&](int64_t row) {
      for (int64_t col = 0; col < half; col += kPanelCols) {
        const int64_t count = half - col < kPanelCols ? half - col : kPanelCols, first = row * x.cols + col;
        const float sum = sum_of_products(row_of<Element>(x.beside, row * half + col, count),
                                          row_of<Element>(x.data, first, count),
                                          row_of<Element>(x.data, first + half, count));
        op.out[col / kPanelCols * x.rows + row] = canonical(sum);
      }
    });
  });
}

namespace {

constexpr int kSquares = 256;  // sums that a row's squares are added to

// In the order that csrc/cuda/rms_rstd.cuh defines.
template <class Element>
float sum_of_squares(const Row<Element>& row) {
  alignas(64) float sums[kSquares] = {};
  for (int64_t col = 0; col < row.count; col += kSquares) {
    const int64_t left = row.count - col;
    const Row<Element> part{row.elements + col, left < kSquares ? left : kSquares};
    for (int i = 0; i < part.count; i += kLanes) {
      const F32 values = part.at(i);
      store(sums + i, load<F32>(sums + i) + values * values);
    }
  }
  for (int distance : {4, 2, 1, 8, 16, 32, 64, 128}) {
    for (int i = 0; i + distance < kSquares; ++i) sums[i] += sums[i + distance];
  }
  return sums[0];
}

}  // namespace

void rms_rstd(const RmsRstd& op, int threads) {
  with_element(op.x.dtype, [&](auto element) {
    using Element = decltype(element);
    parallel_for(op.x.rows, threads, [&](int64_t row) {
      const float sum = sum_of_squares(row_of<Element>(op.x.data, row * op.x.cols, op.x.cols));
      op.out[row] = canonical(te_dist::rms_rstd(sum, float(op.x.cols), op.eps));
    });
  });
}

}  // namespace te_dist::cpu::TE_DIST_ISA
