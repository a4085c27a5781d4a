"""Randomized Hadamard transform of groups of 16 rows."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.kernels import inputs
from te_dist.ops._checks import check_matrix, check_output
from te_dist.ops._library import register
from te_dist.ops.source import Unsummed

GROUP = 16


def hadamard(x: Tensor, *, sign_mask: int, out: Tensor) -> None:
    """Flips the sign of row i of each group of 16 where bit i of `sign_mask` is set, and applies H16 / 4 along rows.

    Sums run in fp32 over rows at distance 1, then 2, 4, 8 (a butterfly), and are rounded once to bf16.

    Args:
        x: bf16 (rows, cols), rows a multiple of 16.
        sign_mask: 16 bits.
        out: bf16 (rows, cols).
    """
    check_matrix("x", x, (torch.bfloat16,))
    check_output("out", out, torch.bfloat16, x.shape)
    check_rows(x.shape[0])
    torch.ops.te_dist.hadamard(x, sign_mask, out)


def check_rows(rows: int, offset: int = 0) -> None:
    """Raises ValueError where a matrix of so many rows, so far inside a larger one, cannot be transformed alone."""
    if rows % GROUP or offset % GROUP:
        raise ValueError(
            f"x: got {rows} rows from offset {offset}, wanted each a multiple of {GROUP}, which the transform mixes; "
            "pad x"
        )


def transformed(x: Tensor, sign_mask: int) -> Tensor:
    """The transform of `x` (rows, cols; fp32, bf16 or fp16), rounded to bf16 before and after."""
    out = torch.empty_like(x, dtype=torch.bfloat16)
    hadamard(x.to(torch.bfloat16), sign_mask=sign_mask, out=out)
    return out


def transformed_source(read: Unsummed, sign_mask: int) -> Unsummed:
    """The transform of what is read, on the CPU."""
    x, name, beside = read
    if name != "plain":
        values = torch.empty(inputs.read(x, name, beside).shape, dtype=x.dtype)
        _C.evaluate(read, values, torch.get_num_threads())
        x = values
    return transformed(x, sign_mask), "plain", []


def _cpu(x: Tensor, sign_mask: int, out: Tensor) -> None:
    _C.hadamard(x, sign_mask, out, torch.get_num_threads())


register("hadamard(Tensor x, int sign_mask, Tensor(a!) out) -> ()", _cpu, kernels.hadamard)
