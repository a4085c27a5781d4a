"""Randomized Hadamard transform of groups of 16 rows."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.ops._checks import check_matrix, check_output
from te_dist.ops._library import register

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
    if x.shape[0] % GROUP:
        raise ValueError(f"x: got {x.shape[0]} rows, wanted a multiple of {GROUP}, which the transform mixes; pad x")
    torch.ops.te_dist.hadamard(x, sign_mask, out)


def _cpu(x: Tensor, sign_mask: int, out: Tensor) -> None:
    _C.hadamard(x, sign_mask, out, torch.get_num_threads())


register("hadamard(Tensor x, int sign_mask, Tensor(a!) out) -> ()", _cpu, kernels.hadamard)
