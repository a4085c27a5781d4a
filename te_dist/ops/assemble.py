"""A matrix from the rectangles it was cut into."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.ops._checks import check_dtype
from te_dist.ops._library import register


def assemble(wires: Sequence[Tensor], *, row_starts: Sequence[int], col_starts: Sequence[int], out: Tensor) -> None:
    """Copies each wire to `out[row_start : row_start + rows, col_start : col_start + cols]`.

    Args:
        wires: 2-D tensors of the dtype of `out`, contiguous along their last dimension.
        row_starts: first row of each wire.
        col_starts: first column of each wire.
        out: 2-D, contiguous along its last dimension.
    """
    _check_rows_contiguous("out", out)
    for index, (wire, row, col) in enumerate(zip(wires, row_starts, col_starts, strict=True)):
        name = f"wires[{index}]"
        check_dtype(name, wire, (out.dtype,))
        _check_rows_contiguous(name, wire)
        rows, cols = wire.shape
        if wire.numel() and (row < 0 or col < 0 or row + rows > out.shape[0] or col + cols > out.shape[1]):
            raise ValueError(f"{name}: got {rows} x {cols} at ({row}, {col}), wanted it inside {tuple(out.shape)}")
    torch.ops.te_dist.assemble(wires, row_starts, col_starts, out)


def _check_rows_contiguous(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 2 or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
        raise ValueError(
            f"{name}: got shape {tuple(tensor.shape)} and strides {tensor.stride()}, wanted a matrix with contiguous "
            "rows; call .contiguous()"
        )


def _cpu(wires: list[Tensor], row_starts: list[int], col_starts: list[int], out: Tensor) -> None:
    _C.assemble(wires, row_starts, col_starts, out, torch.get_num_threads())


register("assemble(Tensor[] wires, int[] row_starts, int[] col_starts, Tensor(a!) out) -> ()", _cpu, kernels.assemble)
