"""Groups of rows, as ops that quantize them see them: what they check, and on the CPU one group after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from te_dist import _C
from te_dist.kernels.inputs import read
from te_dist.kernels.panels import tiles_at_most
from te_dist.ops._checks import check_output, check_packed, check_rows
from te_dist.ops.group_table import TILE, check_table
from te_dist.ops.panel_sums import find_sums, panel_sums
from te_dist.ops.source import Source, Summed, Unsummed, check_source


class Group(NamedTuple):
    """A group that is not empty.

    Attributes:
        rows: of the matrix.
        tiles: of 128 rows, of all groups.
    """

    rows: slice
    tiles: slice

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.rows.stop - self.rows.start

    def padded(self, per_tile: int = TILE) -> slice:
        """The group's part of something that has `per_tile` entries for each tile."""
        return slice(self.tiles.start * per_tile, self.tiles.stop * per_tile)


def groups_of(table: Tensor, rows: int) -> Iterator[tuple[int, Group]]:
    """(number, group) of those in a table on the CPU that are not empty, as far as there are `rows`."""
    begins, tiles = table[:2].tolist()
    for number, (begin, end) in enumerate(zip(begins, begins[1:], strict=False)):
        size = min(end, rows) - begin
        if size > 0:
            yield number, Group(slice(begin, begin + size), slice(tiles[number], tiles[number] + -(-size // TILE)))


def check_groups(x: Tensor | Source, table: Tensor) -> int:
    """Checks the matrix, the table of its groups and where sums go; returns how many tiles there may be."""
    check_source(x.of if isinstance(x, Summed) else x)
    num_groups, (rows, cols) = check_table(table), x.shape
    tiles = tiles_at_most(rows, num_groups)
    if isinstance(x, Summed):
        check_rows("sums", x.sums, (torch.float32,), (tiles, cols), at_least=True)
        check_output("sums", x.sums, torch.float32, (x.sums.shape[0], cols))
    return tiles


def check_padded(name: str, data: Tensor, lines: int, *, tiles: int, per_tile: int, dim: int = 1) -> None:
    """A contiguous u8 matrix that has `lines` along one dimension and room for `tiles` along the other, `dim`."""
    extent = data.shape[dim] if data.dim() == 2 else 0
    if extent % per_tile or extent < tiles * per_tile:
        raise ValueError(
            f"{name}: got {extent} along dimension {dim}, wanted a multiple of {per_tile} from {tiles * per_tile} on: "
            "groups begin at tiles of their own; allocate it for padded_rows(rows, groups)"
        )
    check_output(name, data, torch.uint8, (lines, extent) if dim else (extent, lines))


def check_per_group(name: str, tensor: Tensor, table: Tensor) -> None:
    """f32, one element, or one for each group."""
    shape = (1,) if tensor.numel() == 1 else (table.shape[-1] - 1,)
    check_packed(name, tensor, (torch.float32,), shape)


def place_of(number: int, per_group: Tensor) -> slice:
    """Where something that all groups share, or each has one of, has that of a group."""
    place = number if per_group.shape[0] > 1 else 0
    return slice(place, place + 1)


def matrix_of(x: Tensor, source: str, beside: list[Tensor]) -> Tensor:
    """What a source on the CPU stands for."""
    if source == "plain":
        return x
    out = torch.empty(read(x, source, beside).shape, dtype=x.dtype)
    _C.evaluate((x, source, beside), out, torch.get_num_threads())
    return out


def with_padding(matrix: Tensor, group: Group) -> Tensor:
    """The rows of a group, and zeros up to the end of its last tile."""
    rows = group.padded()
    out = matrix.new_zeros(rows.stop - rows.start, matrix.shape[1])
    out[: group.size] = matrix[group.rows]
    return out


def sum_groups(matrix: Tensor, table: Tensor, sums: Tensor | None) -> None:
    """Sums of panels of every group on the CPU, where they are wanted."""
    if sums is not None:
        for _, group in groups_of(table, len(matrix)):
            panel_sums(matrix[group.rows], out=sums[group.tiles])


def sum_rows(read: Unsummed, table: Tensor, row_sums: Tensor | None) -> None:
    """Sums of the rows of groups on the CPU, where they are wanted."""
    if row_sums is not None:
        found, end = torch.empty_like(row_sums), table[0, -1]
        find_sums(read, None, found)
        row_sums[:, :end] = found[:, :end]
