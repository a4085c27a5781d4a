"""Sums of rows of a matrix, by their numbers: what brings the copies of a token together."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.ops._checks import HIGH_PRECISION, check_matrix, check_output, check_packed
from te_dist.ops._library import register


def gather_sum(x: Tensor, *, positions: Tensor, out: Tensor) -> None:
    """Row r of `out` is the sum of the rows `positions[r]` of `x`: to +0, in their order, in fp32 and rounded once.

    Args:
        x: (x_rows, cols) fp32, bf16 or fp16, contiguous.
        positions: int64 (rows, copies), contiguous; where `x` has no row of a number, nothing is added.
        out: (rows, cols) in the dtype of `x`. NaN is any NaN.
    """
    check_matrix("x", x, HIGH_PRECISION)
    if positions.dim() != 2:
        raise ValueError(f"positions: got {positions.dim()} dimensions, wanted (rows, copies); reshape it")
    check_packed("positions", positions, (torch.int64,), positions.shape)
    check_output("out", out, x.dtype, (positions.shape[0], x.shape[1]))
    torch.ops.te_dist.gather_sum(x, positions, out)


def _cpu(x: Tensor, positions: Tensor, out: Tensor) -> None:
    total = torch.zeros(out.shape, dtype=torch.float32)
    for of_copy in positions.unbind(1):
        there = (of_copy >= 0) & (of_copy < x.shape[0])
        if there.all():
            total += x.index_select(0, of_copy)
        else:
            total[there] += x[of_copy[there]]
    out.copy_(total)


register("gather_sum(Tensor x, Tensor positions, Tensor(a!) out) -> ()", _cpu, kernels.gather_sum)
