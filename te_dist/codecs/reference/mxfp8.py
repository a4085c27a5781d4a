"""MXFP8: FP8 with one power-of-two scale (e8m0 byte) for every block."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist.codecs.reference.casts import Fp8, float8_cast, float8_decode
from te_dist.codecs.reference.f32 import from_bits
from te_dist.codecs.reference.tiles import spread, tile_amax
from te_dist.formats.region import Pair

E8M0_NAN = 0xFF
E8M0_MAX = 0xFE
_RECIPROCAL_MAX_BITS = {"e4m3": 0x3B124925, "e5m2": 0x37924925}  # 1/448 and 1/57344 in f32
_TWO_TO_MINUS_127_BITS = 0x00400000  # subnormal
_NAN_BITS = 0x7FFFFFFF


def e8m0_from_amax(amax: Tensor, fp8: Fp8) -> Tensor:
    """The e8m0 byte (u8) for data of magnitude `amax` (f32): that of amax over the largest FP8 value."""
    return e8m0_ceil(amax * from_bits(_RECIPROCAL_MAX_BITS[fp8]))


def e8m0_ceil(v: Tensor) -> Tensor:
    """The e8m0 byte (u8) of `v` (f32 >= 0) rounded up to a power of two. 0 is byte 0, infinity 254, NaN 255."""
    bits = v.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    fits_byte_0 = (exponent == 0) & (mantissa <= _TWO_TO_MINUS_127_BITS)
    exponent = exponent + ((mantissa > 0) & (exponent != E8M0_MAX) & ~fits_byte_0)
    exponent = torch.where(v.isinf(), E8M0_MAX, exponent)
    return torch.where(v.isnan(), E8M0_NAN, exponent).to(torch.uint8)


def e8m0_decode(e: Tensor) -> Tensor:
    """The power of two (f32) that decodes: 2^(e - 127), NaN for 255."""
    e = e.int()
    bits = torch.where(e == 0, _TWO_TO_MINUS_127_BITS, e << 23)
    return torch.where(e == E8M0_NAN, _NAN_BITS, bits).view(torch.float32)


def e8m0_reciprocal(e: Tensor) -> Tensor:
    """The power of two (f32) that encodes: 2^(127 - e), NaN for 255."""
    e = e.int()
    bits = torch.where(e == E8M0_MAX, _TWO_TO_MINUS_127_BITS, (E8M0_MAX - e) << 23)
    return torch.where(e == E8M0_NAN, _NAN_BITS, bits).view(torch.float32)


def encode_mxfp8(
    x: Tensor, tile: Pair, phase: Pair = (0, 0), amax: Tensor | None = None, *, fp8: Fp8
) -> tuple[Tensor, Tensor]:
    """Codes (u8 (m, k)) and e8m0 bytes (u8 (grid_m, grid_k)) of `x` (m, k)."""
    e = e8m0_from_amax(tile_amax(x, tile, phase) if amax is None else amax, fp8)
    return float8_cast(x.float() * spread(e8m0_reciprocal(e), x.shape, tile, phase), fp8), e


def decode_mxfp8(codes: Tensor, scale_grid: Tensor, tile: Pair, phase: Pair, fp8: Fp8) -> Tensor:
    """Values (f32 (m, k)) of `codes` (u8 (m, k)) under the e8m0 bytes of their tiles."""
    return float8_decode(codes, fp8) * spread(e8m0_decode(scale_grid), codes.shape, tile, phase)
