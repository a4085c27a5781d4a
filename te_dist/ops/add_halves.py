"""The sum of both halves of a matrix, as another type."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.ops._checks import HIGH_PRECISION, check_dtype, check_matrix, check_output
from te_dist.ops._library import register


def add_halves(x: Tensor, *, out: Tensor) -> None:
    """Row r of `out` is row r plus row `rows + r` of `x`, added in fp32 and rounded once.

    Args:
        x: f32 (2 rows, cols), contiguous.
        out: (rows, cols) fp32, bf16 or fp16, contiguous. NaN is any NaN.
    """
    check_matrix("x", x, (torch.float32,))
    if x.shape[0] % 2:
        raise ValueError(f"x: got {x.shape[0]} rows, wanted an even number")
    check_dtype("out", out, HIGH_PRECISION)
    check_output("out", out, out.dtype, (x.shape[0] // 2, x.shape[1]))
    torch.ops.te_dist.add_halves(x, out)


def _cpu(x: Tensor, out: Tensor) -> None:
    upper, lower = x.chunk(2) if x.numel() else (x[: out.shape[0]], x[: out.shape[0]])
    out.copy_(upper + lower)


register("add_halves(Tensor x, Tensor(a!) out) -> ()", _cpu, kernels.add_halves)
