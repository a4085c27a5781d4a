"""Transpose of stored values, by their bits."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.ops._checks import check_choice, check_matrix, check_output, check_shape
from te_dist.ops._library import register

DTYPES = {
    4: (torch.uint8,),
    8: (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    16: (torch.bfloat16, torch.float16, torch.int16, torch.uint16),
    32: (torch.float32, torch.int32, torch.uint32),
}


def transpose(src: Tensor, *, bits: int, out: Tensor) -> None:
    """Writes the transpose of a matrix of values of `bits` bits, or of each of several.

    Args:
        src: (rows, cols); for 4 bits (rows, cols / 2), the even column in the low half of a byte. Contiguous. Up to
            65535 matrices of one shape in one launch: (matrices, rows, cols).
        bits: 4, 8, 16 or 32.
        out: (cols, rows); for 4 bits (cols, rows / 2), the even row in the low half.
    """
    check_choice("bits", bits, tuple(DTYPES))
    *matrices, rows, cols = src.shape if src.dim() == 3 else (*src.shape, 0, 0)[:2]
    check_matrix("src", _joined("src", src), DTYPES[bits])
    if bits == 4 and rows % 2:
        raise ValueError(f"src: got {rows} rows, wanted an even number: two share a byte of the transpose; pad src")
    turned = (2 * cols, rows // 2) if bits == 4 else (cols, rows)
    if matrices:
        check_shape("out", out, (*matrices, *turned))
        turned = (matrices[0] * turned[0], turned[1])
    check_output("out", _joined("out", out), src.dtype, turned)
    torch.ops.te_dist.transpose(src, bits, out)


def _joined(name: str, matrices: Tensor) -> Tensor:
    """All rows of several matrices as those of one; a matrix as it is."""
    if matrices.dim() != 3:
        return matrices
    if not matrices.is_contiguous():
        raise ValueError(f"{name}: got strides {matrices.stride()}, wanted contiguous matrices; call .contiguous()")
    return matrices.flatten(0, 1)


def _cpu(src: Tensor, bits: int, out: Tensor) -> None:
    for matrix, turned in zip(src, out, strict=True) if src.dim() == 3 else [(src, out)]:
        _C.transpose(matrix, bits, turned, torch.get_num_threads())


register("transpose(Tensor src, int bits, Tensor(a!) out) -> ()", _cpu, kernels.transpose)
