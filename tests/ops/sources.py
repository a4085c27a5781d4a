"""Sources whose values are hard to compute, by name, and the tensors they read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from te_dist.ops.source import RmsNorm, Source, SwiGlu, SwiGluGradient
from tests.codecs.kernel_inputs import matrix

Pair = tuple[int, int]


class Case(NamedTuple):
    """A source to be made of tensors, which may be moved before."""

    name: str
    make: Callable[..., Source]
    tensors: dict[str, Tensor]

    @property
    def source(self) -> Source:
        return self.make(**self.tensors)


def gates(kind: str, shape: Pair, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """As `matrix`; normal values are spread over all that silu bends."""
    x = matrix(kind, shape, dtype, seed)
    return x * 6 if kind == "normal" else x


def cases(shape: Pair, dtype: torch.dtype, kind: str) -> Iterator[Case]:
    """All sources of matrices of `shape`; gradients where there are two halves."""
    rows, cols = shape
    yield Case("swiglu", SwiGlu, {"x": gates(kind, (rows, 2 * cols), dtype)})
    if cols % 2 == 0:
        grad = matrix("normal", (rows, cols // 2), dtype, 1)
        yield Case("swiglu gradient", SwiGluGradient, {"x": gates(kind, shape, dtype), "grad": grad})
    x = matrix(kind, shape, dtype)
    rstd = matrix("wide", (rows, 1), torch.float32, 2)[:, 0].abs()
    for gamma_dtype in (torch.float32, dtype):
        gamma = matrix("normal", (1, cols), gamma_dtype, 3)[0]
        tensors = {"x": x, "rstd": rstd, "gamma": gamma}
        yield Case(f"rms norm by {gamma_dtype}", RmsNorm, tensors)
        yield Case(f"zero-centered rms norm by {gamma_dtype}", _zero_centered, tensors)


def _zero_centered(**tensors: Tensor) -> RmsNorm:
    return RmsNorm(**tensors, zero_centered=True)
