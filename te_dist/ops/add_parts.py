"""The sum of matrices that lie below each other, as another type."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.ops._checks import check_matrix, check_product, extents
from te_dist.ops._library import register


def add_parts(x: Tensor, *, out: Tensor, accumulate: bool = False) -> None:
    """Row r of `out` is row r plus row `rows + r` of `x` and so on, added in fp32 in this order and rounded once.

    Args:
        x: f32 (parts * rows, cols), contiguous; one part or more.
        out: (rows, cols) fp32, bf16 or fp16, rows contiguous. NaN is any NaN.
        accumulate: add the sum to what `out`, fp32, holds.

    Raises:
        ValueError: a type or a shape that does not fit.
    """
    check_matrix("x", x, (torch.float32,))
    rows, cols = extents("out", out)
    check_product(out, (rows, cols), accumulate)
    if x.shape[1] != cols or (x.shape[0] % rows or not len(x) if rows else len(x)):
        raise ValueError(f"x: got shape {tuple(x.shape)}, wanted ({rows} for each part, {cols}), as out has")
    torch.ops.te_dist.add_parts(x, accumulate, out)


def _cpu(x: Tensor, accumulate: bool, out: Tensor) -> None:
    if out.numel() == 0:
        return
    first, *others = x.split(out.shape[0])
    total = first.clone()
    for part in others:
        total += part
    out.copy_(out + total if accumulate else total)


register("add_parts(Tensor x, bool accumulate, Tensor(a!) out) -> ()", _cpu, kernels.add_parts)
