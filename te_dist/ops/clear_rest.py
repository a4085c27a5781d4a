"""Zeros in rows that belong to no group."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.ops._checks import HIGH_PRECISION, check_matrix
from te_dist.ops._library import register
from te_dist.ops._taped import taped
from te_dist.ops.group_table import check_table


@taped
def clear_rest(out: Tensor, *, table: Tensor) -> None:
    """Writes zeros into the rows of `out` behind the last group, and nothing else.

    Args:
        out: (T, N) fp32, bf16 or fp16, contiguous.
        table: int32 (4, G + 1), see `group_table`.
    """
    check_matrix("out", out, HIGH_PRECISION)
    check_table(table)
    torch.ops.te_dist.clear_rest(table, out)


def _cpu(table: Tensor, out: Tensor) -> None:
    out[int(table[0, -1]) :] = 0


register("clear_rest(Tensor table, Tensor(a!) out) -> ()", _cpu, kernels.clear_rest)
