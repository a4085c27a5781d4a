// In which order the tiles of a product, or of many products in one launch, are walked over.
#pragma once

#include "types.cuh"

namespace te_dist::cuda {

// One tile of a product. Everything counts in the matrices as they lie in memory, all groups in one.
struct alignas(8) Tile {
  int row;           // of A and of its scales
  int col;           // of the product
  int b_row;         // of B
  int b_scale_row;   // of the scales of B, for the first values that are summed over
  int first_depth;   // of what is summed over; negative where that begins inside of a tile of scales
  int depth_tiles;
  int out_row;       // of the output
  int out_end;       // first row that is not the tile's
  int group;
};

// Tiles of a matrix of tiles in bands along the rows, so that what is read by those who work at the same time stays in the
// L2 cache.
struct Banded {
  int row, col;

  TE_DIST_INLINE Banded of(int index, int row_tiles, int col_tiles, int band) {
    const int in_band = band * col_tiles, number = index / in_band, rest = index - number * in_band;
    const int first = number * band, height = min(band, row_tiles - first), col = rest / height;
    return {first + rest - col * height, col};
  }

  // A last row of tiles that reach beyond the matrix is walked over at the end: they take less time than others, and so
  // even out how long blocks of threads work. `whole`: rows of tiles in front of it.
  TE_DIST_INLINE Banded short_last(int index, int whole, int col_tiles, int band) {
    const int rest = index - whole * col_tiles;
    return rest < 0 ? of(index, whole, col_tiles, band) : Banded{whole, rest};
  }
};

// What a kernel says of its tiles: extents, and blocks of a cluster side by side along the columns. kTurnsB: rows of B, and
// of its scales, are what is summed over, so that those of every tile begin with the matrix.
template <int kRows_, int kCols_, int kCluster_, bool kSquareB_, bool kTurnsB_ = false>
struct TileShape {
  static constexpr int kRows = kRows_, kCols = kCols_, kDepth = 128, kCluster = kCluster_;
  static constexpr bool kSquareB = kSquareB_, kTurnsB = kTurnsB_;
};

// Where in a tile of their scales matrices begin: the first column of the product, and the first value that is summed over.
struct ProductPhase {
  int32_t col, depth;
};

// One product, of matrices that may begin inside of tiles of their scales: the first tiles reach beyond the matrices, as the
// last ones do. Its sum may be cut into parts, which lie below each other in the output.
template <class Shape>
struct OneProduct {
  static constexpr bool kRowsAreAligned = true;  // tiles begin at multiples of their extents
  static constexpr bool kHasBias = true;

  struct Params {
    int32_t rows;
    int32_t row_tiles, col_tiles;  // of a cluster
    int32_t depth_tiles;
    int32_t part_tiles;  // of `depth_tiles`, a multiple of four where there are several parts
    int32_t parts;
    int32_t band;
    ProductPhase phase;
  };

  const Params& p;

  TE_DIST_DEVICE int count() const { return p.row_tiles * p.col_tiles * p.parts; }

  TE_DIST_DEVICE Tile at(int index, int block) const {
    const int in_part = p.row_tiles * p.col_tiles, part = p.parts > 1 ? index / in_part : 0;
    const Banded place = Banded::short_last(index - part * in_part, p.rows / Shape::kRows, p.col_tiles, p.band);
    const int first = part * p.part_tiles, depth_tiles = max(min(p.depth_tiles - first, p.part_tiles), 0);
    const int row = place.row * Shape::kRows, in_tiles = (place.col * Shape::kCluster + block) * Shape::kCols;
    const int col = in_tiles - p.phase.col, b_scale_row = Shape::kSquareB ? in_tiles / Shape::kDepth : first;
    const int out_row = part * p.rows + row, out_end = (part + 1) * p.rows;
    return {row, col, col, b_scale_row, first * Shape::kDepth - p.phase.depth, depth_tiles, out_row, out_end, 0};
  }
};

// Where groups begin, made once for the groups of a matrix: int32 (1 + number of tile heights, groups + 1). Row 0 has the
// first row of each group, the others how many tiles of that height lie before it.
struct GroupTable {
  const int32_t* begins;
  const int32_t* tiles;  // before each group
  int64_t groups;

  // The group that tile number `index` lies in: all lanes of a warp look, at 32 places at a time.
  TE_DIST_DEVICE int group_of(int index) const {
    int first = 0, span = int(groups);
    while (span > 1) {
      const int step = (span + 31) / 32, probe = first + int(threadIdx.x % 32) * step;
      const bool is_before = probe < first + span && __ldg(tiles + probe) <= index;
      const int last = 31 - __clz(__ballot_sync(0xFFFFFFFFu, is_before));
      const int next = first + last * step;
      span = min(step, first + span - next), first = next;
    }
    return first;
  }

  // First row that is not a group's, of a matrix of `rows`, whatever the table was made for.
  TE_DIST_DEVICE int64_t end_of(int group, int64_t rows) const {
    const int64_t end = __ldg(begins + group + 1);
    return end < rows ? end : rows;
  }
};

// Products of rows, in groups, with a matrix B of each group: of rows (T, K) with (groups * N, K), or (groups * K, N).
template <class Shape>
struct RowGroups {
  static constexpr bool kRowsAreAligned = false, kHasBias = true;

  struct Params {
    GroupTable table;
    int32_t rows;  // of A and of the output
    int32_t col_tiles, depth_tiles;
    int32_t b_rows, b_scale_rows;  // of a group
    int32_t band;
    static constexpr ProductPhase phase{0, 0};
  };

  const Params& p;

  TE_DIST_DEVICE int count() const { return __ldg(p.table.tiles + p.table.groups) * p.col_tiles; }

  TE_DIST_DEVICE Tile at(int index, int block) const {
    const int group = p.table.group_of(index / p.col_tiles);
    const int first = __ldg(p.table.tiles + group), row_tiles = __ldg(p.table.tiles + group + 1) - first;
    const Banded place = Banded::of(index - first * p.col_tiles, row_tiles, p.col_tiles, p.band);
    const int row = __ldg(p.table.begins + group) + place.row * Shape::kRows;
    const int col = (place.col * Shape::kCluster + block) * Shape::kCols;
    const int b_row = Shape::kTurnsB ? 0 : col, b_scale_row = Shape::kSquareB ? b_row / Shape::kDepth : 0;
    const int row_end = int(p.table.end_of(group, p.rows));
    return {row, col, group * p.b_rows + b_row, group * p.b_scale_rows + b_scale_row, 0, p.depth_tiles, row, row_end,
            group};
  }
};

// Products that sum over the rows of each group: (M, P) with (N, P), of which each group has a part of columns that begins
// and ends at a tile; the output is (groups * M, N).
template <class Shape>
struct DepthGroups {
  static constexpr bool kRowsAreAligned = true, kHasBias = false;

  struct Params {
    GroupTable table;  // its tiles those of 128 rows
    int32_t tiles;     // along the columns of both operands
    int32_t rows;      // of the output of a group
    int32_t row_tiles, col_tiles;
    int32_t band;
    static constexpr ProductPhase phase{0, 0};
  };

  const Params& p;

  TE_DIST_DEVICE int count() const { return int(p.table.groups) * p.row_tiles * p.col_tiles; }

  TE_DIST_DEVICE Tile at(int index, int block) const {
    const int in_group = p.row_tiles * p.col_tiles, group = index / in_group;
    const Banded place = Banded::short_last(index - group * in_group, p.rows / Shape::kRows, p.col_tiles, p.band);
    const int row = place.row * Shape::kRows, col = (place.col * Shape::kCluster + block) * Shape::kCols;
    const int first = min(__ldg(p.table.tiles + group), p.tiles);  // at most as many as there are, whatever the table says
    const int depth_tiles = min(__ldg(p.table.tiles + group + 1), p.tiles) - first;
    return {row, col, col, first, first * Shape::kDepth, depth_tiles, group * p.rows + row, (group + 1) * p.rows, group};
  }
};

}  // namespace te_dist::cuda
