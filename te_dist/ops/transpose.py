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


def transpose(src: Tensor, *, bits: int, out: Tensor, square: int = 1) -> None:
    """Writes the transpose of a matrix of values of `bits` bits, or of each of several.

    Scales of squares repeat a value: along the rows where they are those of lines, along the columns where they are
    those of columns. The latter follow from the former, out[c, r] = src[r * square, c // square].

    Args:
        src: (rows, at least cols); for 4 bits (rows, at least cols / 2), the even column in the low half of a byte.
            Contiguous. Up to 65535 matrices of one shape in one launch: (matrices, rows, at least cols).
        bits: 4, 8, 16 or 32.
        out: (cols, at least rows); for 4 bits (cols, at least rows / 2), the even row in the low half. Contiguous. What
            lies behind the rows is filled with zeros. Of squares (cols * square or less, at least rows / square).
        square: rows of `src` for which a value stands, and lines of `out` that have it; for 4 bits 1.
    """
    check_choice("bits", bits, tuple(DTYPES))
    pack = 2 if bits == 4 else 1
    *matrices, rows, wide = src.shape if src.dim() == 3 else (*src.shape, 0, 0)[:2]
    *_, cols, long = (0, 0, *out.shape)
    check_matrix("src", _joined("src", src), DTYPES[bits])
    if square < 1 or (square > 1 and bits == 4):
        raise ValueError(
            f"square: got {square} with {bits} bits, wanted 1 or more, and 1 with 4; scales have 8 or more"
        )
    rows = -(-rows // square)
    if rows % pack:
        raise ValueError(f"src: got {rows} rows, wanted an even number: two share a byte of the transpose; pad src")
    if (
        out.dim() != src.dim()
        or list(out.shape[:-2]) != matrices
        or cols > wide * pack * square
        or cols % pack
        or long * pack < rows
    ):
        lines = (*matrices, wide * pack * square, rows // pack)
        raise ValueError(
            f"out: got shape {tuple(out.shape)}, wanted {lines}, of which lines may be fewer or longer; allocate it"
        )
    flat = _joined("out", out)
    check_output("out", flat, src.dtype, tuple(flat.shape))
    torch.ops.te_dist.transpose(src, bits, out, square)


def _joined(name: str, matrices: Tensor) -> Tensor:
    """All rows of several matrices as those of one; a matrix as it is."""
    if matrices.dim() != 3:
        return matrices
    if not matrices.is_contiguous():
        raise ValueError(f"{name}: got strides {matrices.stride()}, wanted contiguous matrices; call .contiguous()")
    return matrices.flatten(0, 1)


def _cpu(src: Tensor, bits: int, out: Tensor, square: int = 1) -> None:
    for matrix, lines in zip(src, out, strict=True) if src.dim() == 3 else [(src, out)]:
        if square == 1:
            _C.transpose(matrix, bits, lines, torch.get_num_threads())
            continue
        turned = lines.new_empty(-(-lines.shape[0] // square), lines.shape[1])
        _C.transpose(matrix[::square].contiguous(), bits, turned, torch.get_num_threads())
        lines.copy_(turned.repeat_interleave(square, 0)[: lines.shape[0]])


register("transpose(Tensor src, int bits, Tensor(a!) out, int square=1) -> ()", _cpu, kernels.transpose)
