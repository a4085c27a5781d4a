"""Where the panels of a matrix lie, and their shapes: csrc/cuda/common/panels.cuh and patch.cuh."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from te_dist.formats.region import Pair
from te_dist.kernels.arguments import PANEL


class Panels(NamedTuple):
    """A way to lie.

    Attributes:
        template: as C++.
        fields: of its struct, as a `Layout` has them.
    """

    template: str
    fields: str


class Lanes(NamedTuple):
    """How a block of threads divides a panel among its eight warps.

    Attributes:
        template: as C++.
        panel: rows and columns.
    """

    template: str
    panel: Pair


SQUARE, WIDE, TALL = Lanes("SquareLanes", PANEL), Lanes("WideLanes", (64, 256)), Lanes("TallLanes", (256, 64))

ONE_MATRIX = Panels("OneMatrix", "panels.phase.row:q panels.phase.col:q")
GROUPED_ROWS = Panels(
    "GroupedRows",
    "panels.table.begins:P panels.table.tiles:P panels.table.groups:q panels.padded_rows:q",
)


def tiles_at_most(rows: int, groups: int) -> int:
    """How many tiles of 128 rows this many groups of a matrix can have together."""
    begun = min(rows, groups)
    return (rows - begun) // PANEL[0] + begun if begun else 0


def grouped_rows(table: Tensor, padded_rows: int) -> tuple[int, int, int, int]:
    """Values of `GroupedRows`. `padded_rows`: of outputs by columns."""
    begins, pitch = table.data_ptr(), table.shape[1]
    return begins, begins + pitch * table.element_size(), pitch - 1, padded_rows
