"""Largest magnitude of groups of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.ops._groups import check_groups, check_per_group, groups_of, matrix_of, place_of
from te_dist.ops._library import register
from te_dist.ops._taped import taped
from te_dist.ops.source import Source, flat_source, unsummed


@taped
def grouped_amax(x: Tensor | Source, *, table: Tensor, out: Tensor) -> None:
    """Writes the largest magnitude of every group, or of all groups. NaN is ignored; without rows it is 0.

    Args:
        x: (T, K), fp32, bf16 or fp16; or a source. Rows behind the last group are not read.
        table: int32 (4, G + 1), see `group_table`.
        out: f32, (G,), or (1,) for all groups.
    """
    check_groups(unsummed(x), table)
    check_per_group("out", out, table)
    torch.ops.te_dist.grouped_amax(*flat_source(unsummed(x))[:3], table, out)


def _cpu(x: Tensor, source: str, beside: list[Tensor], table: Tensor, out: Tensor) -> None:
    out.zero_()
    matrix, found = matrix_of(x, source, beside), torch.empty(1)
    for number, group in groups_of(table, len(matrix)):
        _C.tile_amax((matrix[group.rows], "plain", []), (0, 0), (0, 0), found, torch.get_num_threads())
        its = out[place_of(number, out)]
        torch.maximum(its, found, out=its)


register(
    "grouped_amax(Tensor x, str source, Tensor[] beside, Tensor table, Tensor(a!) out) -> ()",
    _cpu,
    kernels.grouped_amax,
)
