// Plain descriptions of the memory a kernel reads and writes. Kernels allocate nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace te_dist::cpu {

enum class DType { kFloat32, kBFloat16, kFloat16, kByte, kOther };
enum class Fp8 { kE4M3, kE5M2 };

// A contiguous matrix.
struct Matrix {
  void* data;
  DType dtype;
  int64_t rows;
  int64_t cols;
};

// Which row of another matrix each row is.
struct RowIndex {
  const void* numbers = nullptr;  // null: rows are in order
  bool is_wide = false;           // int64, not int32
  int64_t rows = 0;               // of the other matrix

  // Number of the row, -1 where the other matrix has none of that number.
  int64_t of(int64_t row) const {
    if (!numbers) return row;
    const int64_t number =
        is_wide ? static_cast<const int64_t*>(numbers)[row] : static_cast<const int32_t*>(numbers)[row];
    return number < rows ? number : -1;
  }
};

// Where a kernel's matrix comes from: from memory as it lies there, or computed from what lies there and rounded to its
// type, as if it had been written and read again. See csrc/cuda/common/source.cuh.
struct Source {
  enum class Kind { kPlain, kSwiGlu, kSwiGluGradient, kRmsNorm, kZeroCenteredRmsNorm };

  const void* data;  // what the kind reads; all dtypes are `dtype` but for gamma's and rstd's
  DType dtype;
  int64_t rows;  // of the matrix that the kernel sees
  int64_t cols;
  Kind kind = Kind::kPlain;
  const void* beside = nullptr;  // grad, or rstd
  const float* probability = nullptr;  // by which rows are multiplied as well; null: they are not
  Matrix gamma{};
  RowIndex index{};

  // Whether it lies in memory as it is.
  bool is_plain() const { return kind == Kind::kPlain && !index.numbers; }
};

// A 2-D strided view in logical (row, col) order; strides in elements.
template <class T>
struct Plane {
  T* data = nullptr;
  int64_t row_stride = 0;
  int64_t col_stride = 0;

  __attribute__((always_inline)) T& at(int64_t row, int64_t col) const {
    return data[row * row_stride + col * col_stride];
  }
};

// (row, col) offset of a matrix's first element inside its tile.
struct Phase {
  int64_t row;
  int64_t col;
};

// Elements that share a value; 0 stands for the entire dimension.
struct Tile {
  int64_t rows;
  int64_t cols;
};

// One direction of a block format. `amax` (on the tile grid) replaces what the kernel would find; `data` null: not
// wanted.
template <class Scale>
struct BlockOutput {
  Tile tile{};
  Plane<const float> amax{};
  uint8_t* data = nullptr;
  Plane<Scale> scale{};
};

}  // namespace te_dist::cpu
