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
    columns = table.shape[1] if table.dim() == 2 else 0
    check_packed("table", table, (torch.int32,), (1 + len(HEIGHTS), max(columns, 1)))  # of no groups it has one
    return table.shape[1] - 1


def one_group(rows: int, device: torch.device) -> Tensor:
    """The table of one group that has all rows of a matrix."""
    table = torch.empty((1 + len(HEIGHTS), 2), dtype=torch.int32, device=device)
    group_table(None, rows=rows, out=table)
    return table


@taped
def group_table(given: Tensor | None, *, rows: int, out: Tensor, are_sizes: bool = False) -> None:
    """Writes the first row of every group, and how many tiles of 128, 192 and 256 rows lie before it.

    The rows of group g are those from the end of the group before it, or 0, up to its own; rows behind the last end are
    nobody's. On CUDA, what is given stays on the device and is not checked: an end beyond `rows` is read as `rows`, one
    that lies before the end of a group in front as the largest of those: no row has two groups. A size below 0 is 0.

    Args:
        given: int32 or int64 (G,): ends of groups, which do not decrease (equal ones make an empty group), or sizes.
            None for one group that has all rows.
        rows: of the matrix, less than 2^31.
        out: int32 (4, G + 1); at G stand the end of the last group and the numbers of tiles of all groups.
        are_sizes: whether sizes are given, whose sums are the ends.

    Raises:
        ValueError: a type or shape that does not fit, or that many rows.
    """
    if not 0 <= rows < 2**31:
        raise ValueError(f"rows: got {rows}, wanted 0 to {2**31 - 1}, which a table can hold; cut the matrix")
    if given is not None:
        check_packed("given", given, (torch.int32, torch.int64), (given.numel(),))
    groups = 1 if given is None else given.shape[0]
    check_output("out", out, torch.int32, (1 + len(HEIGHTS), groups + 1))
    torch.ops.te_dist.group_table(given, are_sizes, rows, out)


def _cpu(given: Tensor | None, are_sizes: bool, rows: int, out: Tensor) -> None:
    given = torch.tensor([rows]) if given is None else given
    given = torch.cat((given.new_zeros(1), given.clamp(0, rows)))
    begins = given.cumsum(0).clamp(max=rows) if are_sizes else given.cummax(0).values
    sizes = begins[1:] - begins[:-1]
    out[0] = begins
    out[1:, 0] = 0
    for tiles, height in zip(out[1:], HEIGHTS, strict=True):
        tiles[1:] = torch.cumsum((sizes + height - 1) // height, 0)


register("group_table(Tensor? given, bool are_sizes, SymInt rows, Tensor(a!) out) -> ()", _cpu, kernels.group_table)
