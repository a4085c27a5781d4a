"""Rounding to eight and four bit codes: nearest with ties to the even code, or stochastic. All saturate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

Fp8 = Literal["e4m3", "e5m2"]

E2M1_MAX = 6.0
E2M1_NAN = 0x7  # four bits hold no NaN: it becomes +6
FP8_NAN = 0x7F


@dataclass(frozen=True)
class Minifloat:
    """Sign, exponent and mantissa bits. `max_code` is the positive code of the largest finite value."""

    mantissa: int
    bias: int
    max_code: int

    @property
    def max(self) -> float:
        """The largest finite value."""
        return self.value(self.max_code)

    def value(self, code: int) -> float:
        """The value of a positive finite code."""
        exponent, fraction = code >> self.mantissa, code & ((1 << self.mantissa) - 1)
        if exponent:
            fraction += 1 << self.mantissa
        return math.ldexp(fraction, max(exponent, 1) - self.bias - self.mantissa)


FP8: dict[str, Minifloat] = {"e4m3": Minifloat(3, 7, 0x7E), "e5m2": Minifloat(2, 15, 0x7B)}
E2M1 = Minifloat(1, 1, 0x7)


def fp8_max(fp8: Fp8) -> float:
    """448 or 57344."""
    return _minifloat(fp8).max


def float8_cast(y: Tensor, fp8: Fp8) -> Tensor:
    """FP8 codes (u8) of `y` (f32): nearest even, saturating also for infinity, -0 keeps its sign, NaN is 0x7F."""
    code = nearest(y.abs(), _minifloat(fp8)) | y.signbit().to(torch.uint8) << 7
    return code.masked_fill(y.isnan(), FP8_NAN)


def float8_decode(codes: Tensor, fp8: Fp8) -> Tensor:
    """Values (f32) of FP8 codes (u8), infinities of e5m2 and NaN included."""
    return _fp8_table(fp8)[codes.long()]


def e2m1_cast(y: Tensor, random: Tensor | None = None) -> Tensor:
    """E2M1 codes (u8, 0 to 15) of `y` (f32), -0 is 0x8. With `random` (u8, shape of `y`) rounded stochastically.

    Stochastic: a byte b moves |y| up by b / 256 of the step at |y|, then the code at or below that is taken.
    """
    magnitude = y.abs()
    if random is None:
        code = nearest(magnitude, E2M1)
    else:
        step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
        # the product is exact, so that a fused multiply-add gives the same sum
        moved = magnitude + random.float() / 256 * step
        code = (torch.bucketize(moved, _values(E2M1), right=True) - 1).to(torch.uint8)
    return (code | y.signbit().to(torch.uint8) << 3).masked_fill(y.isnan(), E2M1_NAN)


def e2m1_decode(codes: Tensor) -> Tensor:
    """Values (f32) of E2M1 codes (u8, 0 to 15)."""
    positive = _values(E2M1)
    return torch.cat((positive, -positive))[codes.long()]


def nearest(magnitude: Tensor, target: Minifloat) -> Tensor:
    """The code (u8) nearest to `magnitude` (f32 >= 0), ties to the even code, `max_code` above the largest value."""
    # bucketize counts the bounds strictly below: a tie stays with the lower code, as it must where that one is even
    return torch.bucketize(magnitude.contiguous(), _bounds(target)).to(torch.uint8)


@cache
def _values(target: Minifloat) -> Tensor:
    """f32 values of the codes 0 to `max_code`: increasing, and exact."""
    return torch.tensor([target.value(code) for code in range(target.max_code + 1)], dtype=torch.float32)


@cache
def _bounds(target: Minifloat) -> Tensor:
    """Bound i is the largest f32 that rounds to code i."""
    values = _values(target)
    midpoints = (values[:-1] + values[1:]) / 2
    midpoints[1::2] = torch.nextafter(midpoints[1::2], torch.zeros(()))
    return midpoints


@cache
def _fp8_table(fp8: Fp8) -> Tensor:
    target = _minifloat(fp8)
    positive = torch.full((128,), torch.nan)
    positive[: target.max_code + 1] = _values(target)
    if fp8 == "e5m2":
        positive[target.max_code + 1] = torch.inf
    return torch.cat((positive, -positive))


def _minifloat(fp8: Fp8) -> Minifloat:
    if fp8 not in FP8:
        raise ValueError(f"an FP8 type is one of {sorted(FP8)}, got {fp8!r}")
    return FP8[fp8]
