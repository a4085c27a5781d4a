"""The columns of the largest values of each row: what a router chooses."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.ops._checks import check_matrix, check_output, check_packed
from te_dist.ops._library import register
from te_dist.ops._taped import taped


@taped
def top_k(x: Tensor, *, bias: Tensor | None = None, out: Tensor) -> None:
    """Writes the columns of the k largest of `x + bias` in each row, the largest first, of equal ones the leftmost.

    Args:
        x: f32 (rows, cols), contiguous, of less than 2^32 - 1 columns. NaN is larger than all numbers.
        bias: f32 (cols,), contiguous; None for zeros.
        out: int64 (rows, k), k at most `cols`.
    """
    check_matrix("x", x, (torch.float32,))
    if bias is not None:
        check_packed("bias", bias, (torch.float32,), (x.shape[1],))
    found = out.shape[1] if out.dim() == 2 else 0  # noqa: PLR2004
    check_output("out", out, torch.int64, (x.shape[0], found))
    if found > x.shape[1]:
        raise ValueError(f"out: got {found} columns, wanted at most the {x.shape[1]} that `x` has")
    torch.ops.te_dist.top_k(x, bias, out)


def _cpu(x: Tensor, bias: Tensor | None, out: Tensor) -> None:
    values = x if bias is None else x + bias
    out.copy_(values.sort(dim=1, descending=True, stable=True).indices[:, : out.shape[1]])


register("top_k(Tensor x, Tensor? bias, Tensor(a!) out) -> ()", _cpu, kernels.top_k)
