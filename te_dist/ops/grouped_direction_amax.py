"""Largest magnitudes of groups of rows, as each direction of a format is to have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.ops._groups import check_groups, check_per_group, groups_of, matrix_of, place_of, with_padding
from te_dist.ops._library import register
from te_dist.ops._taped import taped
from te_dist.ops.hadamard import transformed
from te_dist.ops.source import Source, flat_source, unsummed


@taped
def grouped_direction_amax(
    x: Tensor | Source,
    *,
    table: Tensor,
    hadamard: int | None = None,
    row_amax: Tensor | None = None,
    col_amax: Tensor | None = None,
) -> None:
    """Writes the largest magnitude of every group, or of all groups, NaN ignored, in one pass over `x`.

    Args:
        x: (T, K), fp32, bf16 or fp16; or a source, whose sums are not found. Rows behind the last group are not read.
        table: int32 (4, G + 1), see `group_table`.
        hadamard: sign mask of a Hadamard transform of the rows of each group (see `hadamard`), zeros behind its last
            row, of which `col_amax` is then.
        row_amax: f32, (G,), or (1,) for all groups: of `x`.
        col_amax: f32, of the shape of `row_amax` if that is there too: of `x` or its transform.

    Raises:
        ValueError: a type or shape that does not fit.
    """
    check_groups(unsummed(x), table)
    for name, out in (("row_amax", row_amax), ("col_amax", col_amax)):
        if out is not None:
            check_per_group(name, out, table)
    if row_amax is not None and col_amax is not None and row_amax.shape != col_amax.shape:
        raise ValueError(f"col_amax: got {col_amax.shape[0]} elements beside {row_amax.shape[0]}; give both as many")
    torch.ops.te_dist.grouped_direction_amax(*flat_source(unsummed(x))[:3], table, hadamard, row_amax, col_amax)


def _cpu(x: Tensor, source: str, beside: list[Tensor], table: Tensor, *rest: Any) -> None:
    hadamard, row_amax, col_amax = rest
    matrix, found = matrix_of(x, source, beside), torch.empty(1)
    for out, mask in ((row_amax, None), (col_amax, hadamard)):
        if out is None:
            continue
        out.zero_()
        for number, group in groups_of(table, len(matrix)):
            part = matrix[group.rows] if mask is None else transformed(with_padding(matrix, group), mask)
            _C.tile_amax((part, "plain", []), (0, 0), (0, 0), found, torch.get_num_threads())
            its = out[place_of(number, out)]
            torch.maximum(its, found, out=its)


register(
    "grouped_direction_amax(Tensor x, str source, Tensor[] beside, Tensor table, int? hadamard, "
    "Tensor(a!)? row_amax, Tensor(b!)? col_amax) -> ()",
    _cpu,
    kernels.grouped_direction_amax,
)
