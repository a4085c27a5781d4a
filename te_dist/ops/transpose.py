"""Transpose of stored values, by their bits."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.ops._checks import check_choice, check_matrix, check_output
from te_dist.ops._library import register

DTYPES = {
    4: (torch.uint8,),
    8: (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    16: (torch.bfloat16, torch.float16, torch.int16, torch.uint16),
    32: (torch.float32, torch.int32, torch.uint32),
}


def transpose(src: Tensor, *, bits: int, out: Tensor) -> None:
    """Writes the transpose of a matrix of values of `bits` bits.

    Args:
        src: (rows, cols); for 4 bits (rows, cols / 2), the even column in the low half of a byte.
        bits: 4, 8, 16 or 32.
        out: (cols, rows); for 4 bits (cols, rows / 2), the even row in the low half.
    """
    check_choice("bits", bits, tuple(DTYPES))
    check_matrix("src", src, DTYPES[bits])
    rows, cols = src.shape
    if bits == 4 and rows % 2:
        raise ValueError(f"src: got {rows} rows, wanted an even number: two share a byte of the transpose; pad src")
    check_output("out", out, src.dtype, (2 * cols, rows // 2) if bits == 4 else (cols, rows))
    torch.ops.te_dist.transpose(src, bits, out)


def _cpu(src: Tensor, bits: int, out: Tensor) -> None:
    _C.transpose(src, bits, out, torch.get_num_threads())


register("transpose(Tensor src, int bits, Tensor(a!) out) -> ()", _cpu, kernels.transpose)
