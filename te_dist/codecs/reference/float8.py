"""FP8 with f32 scales: one for the tensor, or one for every block."""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch
from torch import Tensor

from te_dist.codecs.reference.casts import Fp8, float8_cast, float8_decode, fp8_max
from te_dist.codecs.reference.f32 import quotient
from te_dist.codecs.reference.tiles import spread, tile_amax
from te_dist.formats.region import Pair

_SIGN_AND_EXPONENT = -0x800000  # the bits 0xFF800000 as int32


class Float8Rule(TypedDict):
    """How an amax becomes a scale."""

    fp8: Fp8
    pow2: bool  # round the scale down to a power of two
    eps: float  # smallest amax


def scale_from_amax(amax: Tensor, *, fp8: Fp8, pow2: bool, eps: float, value_for_inf: float) -> Tensor:
    """The multiplier (f32) for data of magnitude `amax` (f32). The order of the steps is part of the format.

    Args:
        amax: f32, any shape. 0, infinity and NaN give 1.
        fp8: the type to fill the range of.
        pow2: drop the mantissa of the scale at the very end.
        eps: `amax` below this is replaced by it.
        value_for_inf: what stands for a scale that overflows.
    """
    floor = torch.full_like(amax, eps)
    amax = torch.where(amax < floor, floor, amax)
    scale = quotient(fp8_max(fp8), amax)
    scale = torch.where(scale.isinf(), torch.full_like(scale, value_for_inf), scale)
    if pow2:
        scale = (scale.view(torch.int32) & _SIGN_AND_EXPONENT).view(torch.float32)
    return torch.where(amax.isfinite() & (amax != 0), scale, torch.ones_like(scale))


def encode_float8_tensor(x: Tensor, scale: Tensor, fp8: Fp8) -> Tensor:
    """Codes (u8, shape of `x`) of `x` times `scale` (f32, one element)."""
    return float8_cast(x.float() * scale.reshape(()), fp8)


def encode_float8_block(
    x: Tensor, tile: Pair, phase: Pair = (0, 0), amax: Tensor | None = None, **rule: Unpack[Float8Rule]
) -> tuple[Tensor, Tensor]:
    """Codes (u8 (m, k)) and inverse scales (f32 (grid_m, grid_k)) of `x` (m, k).

    `amax` (f32, on the tile grid) replaces that of `x`, for tiles that reach beyond it.
    """
    if amax is None:
        amax = tile_amax(x, tile, phase)
    scale = scale_from_amax(amax, value_for_inf=torch.finfo(x.dtype).max, **rule)
    codes = float8_cast(x.float() * spread(scale, x.shape, tile, phase), rule["fp8"])
    return codes, quotient(1.0, scale)


def decode_float8(codes: Tensor, scale_grid: Tensor, tile: Pair, phase: Pair, fp8: Fp8) -> Tensor:
    """Values (f32 (m, k)) of `codes` (u8 (m, k)) times the inverse scale of their tile."""
    return float8_decode(codes, fp8) * spread(scale_grid, codes.shape, tile, phase)
