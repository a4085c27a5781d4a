// Largest magnitude of every tile.
#include "encode.h"
#include "kernels_of_level.h"
#include "parallel.h"
#include "source.h"

#include <cstring>

namespace te_dist::cpu::TE_DIST_ISA {
namespace {

constexpr int kColumns = 8192;  // columns reduced at a time, as many as the cache holds keys for
constexpr int kRows = 128;      // rows reduced at a time, at most

struct RowRange {
  int64_t begin, end;  // rows of the matrix
  int64_t tile;        // row of the tile grid
};

// Largest of non-negative floats, whose order is that of their bits. Rows of one tile may fall to several threads.
void raise_to(float* target, float value) {
  uint32_t* bits = reinterpret_cast<uint32_t*>(target);
  uint32_t seen = __atomic_load_n(bits, __ATOMIC_RELAXED);
  while (seen < bits_of(value) &&
         !__atomic_compare_exchange_n(bits, &seen, bits_of(value), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// Rows of a tile are cut into chunks of at most kRows, counted from the tile's first row.
struct Chunks {
  int64_t rows, phase, tile, per_tile, count;

  Chunks(int64_t rows_, int64_t phase_, int64_t tile_)
      : rows(rows_),
        phase(tile_ ? phase_ : 0),
        tile(tile_ ? tile_ : rows_),
        per_tile((tile + kRows - 1) / kRows),
        count(rows ? (phase + rows + tile - 1) / tile * per_tile : 0) {}

  RowRange operator[](int64_t index) const {
    const int64_t grid_row = index / per_tile;
    const int64_t start = grid_row * tile - phase + index % per_tile * kRows;
    const int64_t tile_stop = (grid_row + 1) * tile - phase;
    const int64_t stop = start + kRows < tile_stop ? start + kRows : tile_stop;
    return {start > 0 ? start : 0, stop < rows ? stop : rows, grid_row};
  }
};

// Largest keys of `count` columns, NaN left out.
template <class Element>
void reduce_rows(const TileAmax& op, const RowRange& rows, int64_t col, int count, typename Element::Key* keys) {
  using Key = typename Element::Key;
  alignas(64) typename Element::Storage computed[kColumns];
  const auto row = [&](int64_t r) {
    if (op.x.is_plain()) {
      return static_cast<const typename Element::Storage*>(op.x.data) + r * op.x.cols + col;
    }
    compute_row<Element>(op.x, r, col, count, computed);
    return static_cast<const typename Element::Storage*>(computed);
  };
  const int whole = count / kStep * kStep;
  std::memset(keys, 0, sizeof(Key) * size_t(count));
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const auto* elements = row(r);
    raise_keys<Element>(elements, whole, keys);
    raise_finite_keys<Element>(elements + whole, count - whole, keys + whole);
  }
  Key largest = 0;
  for (int c = 0; c < whole; ++c) largest = larger(largest, keys[c]);
  if (largest <= Element::kNotFinite) return;
  std::memset(keys, 0, sizeof(Key) * size_t(count));
  for (int64_t r = rows.begin; r < rows.end; ++r) raise_finite_keys<Element>(row(r), count, keys);
}

template <class Element>
void reduce_chunk(const TileAmax& op, const RowRange& rows, int64_t grid_cols) {
  using Key = typename Element::Key;
  const int64_t tile = op.tile.cols ? op.tile.cols : op.x.cols;
  const int64_t phase = op.tile.cols ? op.phase.col : 0;
  float* out = op.out + rows.tile * grid_cols;
  alignas(64) Key keys[kColumns];
  for (int64_t col = 0; col < op.x.cols; col += kColumns) {
    const int count = int(op.x.cols - col < kColumns ? op.x.cols - col : kColumns);
    reduce_rows<Element>(op, rows, col, count, keys);
    for (int c = 0; c < count;) {
      const int64_t grid_col = (phase + col + c) / tile;
      const int64_t tile_stop = (grid_col + 1) * tile - phase - col;
      const int stop = tile_stop < count ? int(tile_stop) : count;
      Key largest = 0;
      for (; c < stop; ++c) largest = larger(largest, keys[c]);
      raise_to(out + grid_col, Element::magnitude_of(largest));
    }
  }
}

}  // namespace

void tile_amax(const TileAmax& op, int threads) {
  const int64_t grid_rows = !op.tile.rows ? 1 : op.x.rows ? (op.phase.row + op.x.rows - 1) / op.tile.rows + 1 : 0;
  const int64_t grid_cols = !op.tile.cols ? 1 : op.x.cols ? (op.phase.col + op.x.cols - 1) / op.tile.cols + 1 : 0;
  for (int64_t i = 0; i < grid_rows * grid_cols; ++i) op.out[i] = 0.0f;
  const Chunks chunks(op.x.rows, op.phase.row, op.tile.rows);
  with_element(op.x.dtype, [&](auto element) {
    using Element = decltype(element);
    parallel_for(chunks.count, threads, [&](int64_t index) {
      const RowRange rows = chunks[index];
      if (rows.begin < rows.end) reduce_chunk<Element>(op, rows, grid_cols);
    });
  });
}

}  // namespace te_dist::cpu::TE_DIST_ISA
