// Where the panels of a matrix lie, and where in an output what is written by columns goes. The rows are those of one
// matrix, or of groups: a panel has rows of one group alone, so that nothing which is shared or found is of two.
#pragma once

#include "patch.cuh"
#include "tiles.cuh"

namespace te_dist::cuda {

// The matrix that a panel is part of: it ends where the rows of the panel's group do.
struct View {
  Extents extents;
  Phase phase;  // panels begin so much before the matrix
  int group;
};

struct OneMatrix {
  static constexpr bool kIsGrouped = false;

  Phase phase;

  template <class Lanes = SquareLanes>
  TE_DIST_DEVICE View view(const Extents& extents, int64_t) const {
    return view_of_tile(extents, 0);
  }
  TE_DIST_DEVICE View view_of_tile(const Extents& extents, int) const { return {extents, phase, 0}; }
  TE_DIST_DEVICE int64_t tiled_rows(const View& view) const { return view.phase.row + view.extents.rows; }
  TE_DIST_DEVICE int64_t col_rows(const Extents& extents) const { return extents.rows; }
  TE_DIST_INLINE int64_t col_row(const View&, int64_t row) { return row; }
};

// A tile of the table is as wide as the matrix, and one panel or several high. What is written by columns begins, for
// every group, at a tile of its own.
struct GroupedRows {
  static constexpr bool kIsGrouped = true;

  GroupTable table;  // its tiles those of kPanel rows
  int64_t padded_rows;

  template <class Lanes = SquareLanes>
  TE_DIST_DEVICE View view(const Extents& extents, int64_t panel) const {
    static_assert(kPanel % Lanes::kRows == 0, "panels have rows of one tile");
    constexpr int kDown = kPanel / Lanes::kRows;
    return view_of_tile(extents, int(panel) / (kDown * int(panels_along(extents.cols, Lanes::kCols))));
  }

  TE_DIST_DEVICE View view_of_tile(const Extents& extents, int tile) const {
    const int group = table.group_of(tile);
    const int64_t begin = __ldg(table.begins + group);
    const int64_t tiled_row = int64_t(__ldg(table.tiles + group)) * kPanel;
    return {{table.end_of(group, extents.rows), extents.cols}, {tiled_row - begin, 0}, group};
  }

  // How many rows the grid of tiles has, how many an output by columns, and which of them a row of the matrix becomes.
  TE_DIST_DEVICE int64_t tiled_rows(const View&) const { return padded_rows; }
  TE_DIST_DEVICE int64_t col_rows(const Extents&) const { return padded_rows; }
  TE_DIST_INLINE int64_t col_row(const View& view, int64_t row) { return row + view.phase.row; }
};

// The view of a panel, and where a thread's patch lies in it; of those that are read in pairs, half the columns are walked.
template <bool kIsPaired, class Lanes, class Panels>
TE_DIST_INLINE View view_of(const Panels& panels, const Extents& extents, int64_t panel) {
  if constexpr (!kIsPaired) return panels.template view<Lanes>(extents, panel);
  View view = panels.template view<Lanes>({extents.rows, extents.cols / 2}, panel);
  view.extents.cols = extents.cols;
  return view;
}

template <bool kIsPaired, class Lanes>
TE_DIST_INLINE Place place_of(const View& view, int64_t panel) {
  if constexpr (!kIsPaired) return Place::of<Lanes>(view.extents, view.phase, panel);
  Place place = Place::of<Lanes>({view.extents.rows, view.extents.cols / 2}, view.phase, panel);
  place.extents = view.extents;
  return place;
}

}  // namespace te_dist::cuda
