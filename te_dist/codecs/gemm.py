"""Which function multiplies which pair of encodings: one table, without a default.

A product sums over one logical dimension of each operand and keeps the other:

    forward  y  (M, N) = x  (M, K) . weight (N, K)     both sum over their columns
    dgrad    dx (M, K) = dy (M, N) . weight (N, K)     dy over its columns, weight over its rows
    wgrad    dw (N, K) = dy (M, N) . x (M, K)          both over their rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from te_dist.codecs.base import Codec
from te_dist.codecs.block import Block
from te_dist.codecs.high_precision import HighPrecision
from te_dist.codecs.mxfp8 import MxFp8
from te_dist.codecs.nvfp4 import NvFp4
from te_dist.codecs.tensorwise import Tensorwise
from te_dist.formats import Encoding, Region


@dataclass(frozen=True)
class Operand:
    """One matrix of a product, as it is stored.

    Attributes:
        encoding: what is read.
        stored: its stored tensors.
        region: rows and columns they describe.
        sums_over: logical dimension (0: rows, 1: columns) that the product sums over.
    """

    encoding: Encoding
    stored: tuple[Tensor, ...]
    region: Region
    sums_over: int

    @property
    def device(self) -> torch.device:
        return self.stored[0].device

    def values(self, dtype: torch.dtype) -> Tensor:
        """(kept, summed) values in `dtype`: what is multiplied, any transform left in."""
        out = torch.empty(self.region.shape, dtype=dtype, device=self.device)
        self.encoding.codec.operand(self.stored, self.encoding.fields, self.region, out=out)
        return out if self.sums_over == 1 else out.t()


Gemm = Callable[[Operand, Operand, torch.dtype, Tensor | None], Tensor]
QUANTIZED = (Block, MxFp8, NvFp4, Tensorwise)
_TABLE: dict[tuple[type[Codec], type[Codec], str], Gemm] = {}


def multiply(a: Operand, b: Operand, *, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """(kept of a, kept of b) product in `dtype`; `bias`, of kept of b, is added before rounding to it.

    Raises:
        NotImplementedError: no function multiplies these two encodings on this device.
        ValueError: the operands were not transformed alike, or do not sum over the same extent.
    """
    gemm = find(a.encoding.codec, b.encoding.codec, a.device.type)
    extents = [operand.region.shape[operand.sums_over] for operand in (a, b)]
    if extents[0] != extents[1]:
        raise ValueError(f"a product sums over {extents[0]} values of one operand and {extents[1]} of the other")
    return gemm(a, b, dtype, bias)


def find(a: Codec, b: Codec, device: str) -> Gemm:
    """The function that multiplies encodings of `a` and `b` on devices of this type; raises as `multiply` does."""
    gemm = _TABLE.get((type(a), type(b), device))
    if gemm is None:
        known = sorted({kind for *_, kind in _TABLE})
        raise NotImplementedError(
            f"no GEMM of {type(a).__name__} by {type(b).__name__} on {device}; there are GEMMs on {known}. "
            f"Choose a recipe whose pairs exist on {device}, or move the module"
        )
    transforms = [_transform(codec) for codec in (a, b)]
    if transforms[0] != transforms[1]:
        raise ValueError(
            f"operands of one product must be transformed alike, got sign masks {transforms[0]} and {transforms[1]} "
            f"(None: not transformed) of {a} and {b}; give both the same hadamard or none"
        )
    return gemm


def implements(pairs: Iterable[tuple[type[Codec], type[Codec]]], *devices: str) -> Callable[[Gemm], Gemm]:
    """Decorator: enters a function for `pairs` of codec types on `devices`; a pair can have one only."""

    def register(gemm: Gemm) -> Gemm:
        for key in ((*pair, device) for pair in pairs for device in devices):
            if key in _TABLE:
                raise ValueError(f"{key} is implemented twice; remove one function")
            _TABLE[key] = gemm
        return gemm

    return register


def _transform(codec: Codec) -> int | None:
    """The sign mask of the Hadamard transform that a product has to undo; None for no transform."""
    return codec.hadamard if isinstance(codec, NvFp4) else None


@implements(tuple(product((*QUANTIZED, HighPrecision), repeat=2)), "cpu", "cuda")
def _by_values(a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Values in fp32, where every code times its scale is rounded once, multiplied in fp32.

    The definition of every product. On CUDA it is what there is until tensor cores read the codes: right, not fast.
    """
    with torch.autocast(a.device.type, enabled=False):
        out = a.values(torch.float32) @ b.values(torch.float32).t()
    return (out if bias is None else out.add_(bias)).to(dtype)
