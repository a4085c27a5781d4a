"""Reciprocal of the root mean square of every row."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.ops._checks import check_matrix, check_packed
from te_dist.ops._library import register
from te_dist.ops.source import RmsNorm


def rms_rstd(x: Tensor, *, eps: float, out: Tensor) -> None:
    """Writes 1 / sqrt(mean of squares + eps) of each row.

    Column c is added, squared, to sum number c % 256, from left to right, in fp32; the 256 sums are folded in pairs at
    distances 4, 2, 1 and then 8, 16, 32, 64, 128. NaN is 0x7FFFFFFF.

    Args:
        x: (rows, cols), fp32, bf16 or fp16.
        eps: added under the root.
        out: f32, (rows,), contiguous.
    """
    check_matrix("x", x)
    check_packed("out", out, (torch.float32,), (x.shape[0],))
    torch.ops.te_dist.rms_rstd(x, eps, out)


def rms_norm(x: Tensor, gamma: Tensor, *, eps: float, zero_centered: bool = False) -> RmsNorm:
    """The norm of the rows of `x` (rows, cols) as a source, its `rstd` found here."""
    rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    rms_rstd(x, eps=eps, out=rstd)
    return RmsNorm(x, rstd, gamma, zero_centered)


def _cpu(x: Tensor, eps: float, out: Tensor) -> None:
    _C.rms_rstd(x, eps, out, torch.get_num_threads())


register("rms_rstd(Tensor x, float eps, Tensor(a!) out) -> ()", _cpu, kernels.rms_rstd)
