"""Where the groups of a matrix's rows begin, in the form that ops on groups read."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.kernels.grouped_gemm import HEIGHTS
from te_dist.kernels.panels import tiles_at_most
from te_dist.ops._checks import check_output, check_packed
from te_dist.ops._library import register
from te_dist.ops._taped import taped

TILE = 128


def padded_rows(rows: int, groups: int) -> int:
    """Rows that are enough for groups of any sizes of a matrix of `rows`, if each begins at a tile of 128."""
    return TILE * tiles_at_most(rows, groups)


def check_table(table: Tensor) -> int:
    """Checks a group table; returns the number of groups."""
    check_packed("table", table, (torch.int32,), (1 + len(HEIGHTS), table.shape[-1]))
    return table.shape[1] - 1


@taped
def group_table(given: Tensor, *, rows: int, out: Tensor, are_sizes: bool = False) -> None:
    """Writes the first row of every group, and how many tiles of 128, 192 and 256 rows lie before it.

    The rows of group g are those from the end of the group before it, or 0, up to its own; rows behind the last end are
    nobody's. On CUDA, what is given stays on the device. An end beyond `rows` is read as `rows`, a size below 0 as 0.

    Args:
        given: int32 or int64 (G,): ends of groups, which do not decrease (equal ones make an empty group), or sizes.
        rows: of the matrix.
        out: int32 (4, G + 1); at G stand the end of the last group and the numbers of tiles of all groups.
        are_sizes: whether sizes are given, whose sums are the ends.
    """
    check_packed("given", given, (torch.int32, torch.int64), (given.numel(),))
    check_output("out", out, torch.int32, (1 + len(HEIGHTS), given.shape[0] + 1))
    torch.ops.te_dist.group_table(given, are_sizes, rows, out)


def _cpu(given: Tensor, are_sizes: bool, rows: int, out: Tensor) -> None:
    ends = given.clamp(0, rows).cumsum(0) if are_sizes else given
    begins = torch.cat((ends.new_zeros(1), ends)).clamp(0, rows)
    sizes = (begins[1:] - begins[:-1]).clamp(min=0)
    out[0] = begins
    out[1:, 0] = 0
    for tiles, height in zip(out[1:], HEIGHTS, strict=True):
        tiles[1:] = torch.cumsum((sizes + height - 1) // height, 0)


register("group_table(Tensor given, bool are_sizes, int rows, Tensor(a!) out) -> ()", _cpu, kernels.group_table)
