// Which tiles there are in products of groups whose operands may lie either way, see operand_descriptor.
#pragma once

#include "tiles.cuh"
#include "wgmma_halves.cuh"

namespace te_dist::cuda {

// One tile of a product of a group. Everything counts in the matrices as they lie in memory, all groups in one.
struct GroupTile {
  int a_kept, a_first;  // of A: first kept value, first value that is summed over
  int b_kept, b_first;  // of B
  int count;            // values that are summed over
  int col;              // of the output
  int out_row;          // of the output
  int out_end;          // first row that is not the tile's
  int group;
};

// What a kernel says of its tiles: extents, blocks of a cluster one below the other along the rows, and how operands lie.
template <int kRows, int kCols_, int kCluster, Along kA_, Along kB_>
struct GroupTileShape {
  static constexpr int kCols = kCols_;
  static constexpr Along kA = kA_, kB = kB_;

  // First row of a block, by the number of its cluster's tile.
  TE_DIST_INLINE int row_of(int tile, int block) { return (tile * kCluster + block) * kRows; }
};

// Products of rows, in groups, with a matrix B of each group, of which the matrices lie one below the other.
template <class Shape>
struct GroupProducts {
  static constexpr bool kHasBias = true;

  struct Params {
    GroupTable table;  // its tiles those of a cluster
    int32_t rows;      // of A and of the output
    int32_t col_tiles;
    int32_t summed;
    int32_t b_rows;  // of a group
    int32_t band;
  };

  const Params& p;

  TE_DIST_DEVICE int count() const { return __ldg(p.table.tiles + p.table.groups) * p.col_tiles; }

  TE_DIST_DEVICE GroupTile at(int index, int block) const {
    const int group = p.table.group_of(index / p.col_tiles);
    const int first = __ldg(p.table.tiles + group), row_tiles = __ldg(p.table.tiles + group + 1) - first;
    const Banded place = Banded::of(index - first * p.col_tiles, row_tiles, p.col_tiles, p.band);
    const int row = __ldg(p.table.begins + group) + Shape::row_of(place.row, block), col = place.col * Shape::kCols;
    const int b_row = group * p.b_rows, row_end = int(p.table.end_of(group, p.rows));
    if constexpr (Shape::kB == Along::kSummed) return {row, 0, b_row + col, 0, p.summed, col, row, row_end, group};
    return {row, 0, col, b_row, p.summed, col, row, row_end, group};
  }
};

// Products that sum over the rows of each group; the output is (groups * M, N). Operands are (T, M) and (T, N) with groups
// that begin at any row; or (M, P) and (N, P) with groups that begin and end at a tile of columns.
template <class Shape>
struct GroupSums {
  static constexpr bool kHasBias = false;
  static constexpr int kTile = 128;

  struct Params {
    GroupTable table;  // its tiles those of 128 rows
    int32_t summed;    // rows, or columns, of both operands
    int32_t rows;      // of the output of a group
    int32_t row_tiles, col_tiles;  // of a cluster
    int32_t band;
  };

  const Params& p;

  TE_DIST_DEVICE int count() const { return int(p.table.groups) * p.row_tiles * p.col_tiles; }

  // At most where the operands end, whatever the table was made for.
  TE_DIST_DEVICE int begin_of(int group) const {
    if constexpr (Shape::kA == Along::kKept) return min(__ldg(p.table.begins + group), p.summed);
    return min(__ldg(p.table.tiles + group), p.summed / kTile) * kTile;
  }

  TE_DIST_DEVICE GroupTile at(int index, int block) const {
    const int in_group = p.row_tiles * p.col_tiles, group = index / in_group;
    const Banded place = Banded::of(index - group * in_group, p.row_tiles, p.col_tiles, p.band);
    const int row = Shape::row_of(place.row, block), col = place.col * Shape::kCols;
    const int first = begin_of(group), count = begin_of(group + 1) - first;
    return {row, first, col, first, count, col, group * p.rows + row, (group + 1) * p.rows, group};
  }
};

}  // namespace te_dist::cuda
