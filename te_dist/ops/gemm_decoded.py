"""Product of two matrices in any encodings, decoded on their way to tensor cores."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.formats.region import Pair
from te_dist.kernels.gemm_decoded import BITS, SCALED_SUM, is_turned
from te_dist.ops._checks import (
    HIGH_PRECISION,
    check_choice,
    check_dtype,
    check_packed,
    check_product,
    check_shape,
    grid_shape,
)
from te_dist.ops._library import register

_POWERS, _FLOATS = (1, 32), (1, 16)  # (kept, summed) values of a scale byte: of FP8, of e2m1
_SUMS = ((1, SCALED_SUM), (SCALED_SUM, SCALED_SUM))  # of an fp32 scale
_HIGH_PRECISION = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Coded(NamedTuple):
    """A matrix of (kept, summed) values: code * scale * factor * constant.

    Attributes:
        codes: logical (kept, summed) view, one of its dimensions contiguous: u8, or bf16 or fp16 values. Two e2m1 codes
            share a byte along the summed dimension.
        kind: "e4m3", "e5m2", "e2m1", "bfloat16" or "float16".
        scale: logical view on the grid of `tile`; None for none. u8: of FP8 e8m0 for (1, 32) values, of e2m1 e4m3 for
            (1, 16); along the kept dimension where codes lie so. f32: of FP8, for (1, 128) or (128, 128).
        tile: (kept, summed) values that a scale covers.
        phase: of the first value in its tile.
        factor: f32, (1, 1) or (kept, 1); None for none.
        constant: a number.
    """

    codes: Tensor
    kind: str
    scale: Tensor | None = None
    tile: Pair = (1, 1)
    phase: Pair = (0, 0)
    factor: Tensor | None = None
    constant: float = 1.0

    @property
    def shape(self) -> Pair:
        """(kept, summed)."""
        kept, stored = self.codes.shape
        return kept, stored * (2 if self.kind == "e2m1" else 1)


def gemm_decoded(a: Coded, b: Coded, *, out: Tensor, bias: Tensor | None = None, accumulate: bool = False) -> None:
    """out (M, N) = a (M, K) b (N, K)^T + bias, summed in fp32.

    What is multiplied is exact, in bf16 or fp16, but below 2^-126; fp32 scales are applied to sums. fp16 values are
    rounded to bf16 beside FP8 with scale bytes, whose range fp16 has not. On Hopper only. Any address and pitch do;
    multiples of 16 bytes are fastest.

    Args:
        a, b: see `Coded`; at least one of them has codes.
        out: (M, N) fp32, bf16 or fp16, rows contiguous; fp32 to accumulate.
        bias: (N,) fp32, bf16 or fp16, added before rounding.
        accumulate: add to what `out` holds.

    Raises:
        ValueError: a type, shape or layout that does not fit, or tiles that begin at different places in the summed
            dimension.
        NotImplementedError: on another device than CUDA.
    """
    for name, operand in (("a", a), ("b", b)):
        _check(name, operand)
    if a.kind in _HIGH_PRECISION.values() and b.kind in _HIGH_PRECISION.values():
        raise ValueError(f"a, b: got {a.kind} and {b.kind}, wanted codes in at least one; use torch.mm")
    (rows, summed), (cols, also_summed) = a.shape, b.shape
    if summed != also_summed:
        raise ValueError(f"b: got {also_summed} summed values, wanted {summed} as in a; sum over one dimension")
    check_product(out, (rows, cols), accumulate)
    if bias is not None:
        check_packed("bias", bias, HIGH_PRECISION, (cols,))
    torch.ops.te_dist.gemm_decoded(*a, *b, summed, _shift(a, b), bias, accumulate, out)


def _check(name: str, operand: Coded) -> None:
    codes, kind, scale, tile, phase, factor, _ = operand
    high_precision = _HIGH_PRECISION.get(codes.dtype)
    if codes.dtype == torch.float32:
        raise ValueError(
            f"{name}: got fp32 values, which tensor cores do not multiply exactly; cast them to bf16 or fp16"
        )
    check_dtype(f"{name}.codes", codes, (torch.uint8, *_HIGH_PRECISION))
    check_choice(f"{name}.kind", kind, tuple(BITS) if codes.dtype == torch.uint8 else (high_precision,))
    if codes.dtype == torch.uint8 and kind in _HIGH_PRECISION.values():
        raise ValueError(f"{name}.codes: got torch.uint8 for {kind} values; view them as their type")
    if codes.dim() != 2 or (codes.numel() and not _has_lines(codes, packed=kind == "e2m1")):
        raise ValueError(
            f"{name}.codes: got shape {tuple(codes.shape)} and strides {codes.stride()}, wanted a matrix with a "
            "contiguous dimension, the summed one for e2m1; copy or transpose it"
        )
    if (kind == "e2m1") != (scale is not None and tuple(tile) == _FLOATS):
        raise ValueError(f"{name}: got {kind} with tiles of {tile}, wanted e2m1 with scales for {_FLOATS}; pass both")
    if scale is not None:
        tiles = _SUMS if scale.dtype == torch.float32 else (_FLOATS if kind == "e2m1" else _POWERS,)
        check_dtype(f"{name}.scale", scale, (torch.uint8, torch.float32))
        check_choice(f"{name}.tile", tuple(tile), tiles if kind not in _HIGH_PRECISION.values() else ())
        check_shape(f"{name}.scale", scale, grid_shape(operand.shape, phase, tile))
        if scale.dtype == torch.uint8 and is_turned(codes) and scale.shape[0] > 1 and scale.stride(0) != 1:
            raise ValueError(
                f"{name}.scale: got strides {scale.stride()}, wanted the kept dimension contiguous as of the codes"
            )
    if factor is not None:
        check_dtype(f"{name}.factor", factor, (torch.float32,))
        check_shape(f"{name}.factor", factor, (1, 1) if factor.numel() == 1 else (operand.shape[0], 1))


def _has_lines(matrix: Tensor, *, packed: bool) -> bool:
    """Whether a dimension is contiguous: the second where two codes share a byte of it."""
    return 1 in matrix.stride()[1 if packed else 0 :] or 1 in matrix.shape[1 if packed else 0 :]


def _shift(a: Coded, b: Coded) -> int:
    """Position of the first summed value, counted from a multiple of both operands' tiles."""
    scaled = sorted(
        (operand.tile[1], operand.phase[1] % operand.tile[1]) for operand in (a, b) if operand.scale is not None
    )
    if not scaled:
        return 0
    shift = scaled[-1][1]
    if any(shift % extent != phase for extent, phase in scaled):
        raise ValueError(
            f"a, b: got summed values from {a.phase[1]} on in tiles of {a.tile[1]} and from {b.phase[1]} on in tiles "
            f"of {b.tile[1]}, wanted the same place in the smaller tile; cut both matrices at multiples of it"
        )
    return shift


register(
    "gemm_decoded("
    "Tensor a, str a_kind, Tensor? a_scale, int[] a_tile, int[] a_phase, Tensor? a_factor, float a_constant, "
    "Tensor b, str b_kind, Tensor? b_scale, int[] b_tile, int[] b_phase, Tensor? b_factor, float b_constant, "
    "int summed, int shift, Tensor? bias, bool accumulate, Tensor(a!) out) -> ()",
    None,
    kernels.gemm_decoded,
)
