"""Sources whose values are hard to compute, by name, and the tensors they read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from te_dist.ops.source import Gathered, RmsNorm, Source, Summed, SwiGlu, SwiGluGradient, row_sums_shape, sums_shape
from tests.codecs.kernel_inputs import matrix

Pair = tuple[int, int]


def sums_of(source: Source) -> dict[str, Tensor]:
    """Poisoned buffers for the sums that can be found of a source, by name."""
    found = {"sums": torch.full(sums_shape(source), 77.0)}
    if isinstance(source, SwiGluGradient) and source.probability is not None:
        found["row_sums"] = torch.full(row_sums_shape(source.grad), 77.0)
    return found


def with_sums(source: Source, *, sums: Tensor | None = None, row_sums: Tensor | None = None) -> Source:
    """The same, whose sums are written."""
    source = source if row_sums is None else replace(source, row_sums=row_sums)
    return source if sums is None else Summed(source, sums)


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
    """All sources of matrices of `shape`."""
    yield from in_order_cases(shape, dtype, kind)
    yield from gathered_cases(shape, dtype, kind)


def in_order_cases(shape: Pair, dtype: torch.dtype, kind: str) -> Iterator[Case]:
    """Those that read rows in order; gradients where there are two halves."""
    rows, cols = shape
    probability = matrix("normal", (rows, 1), torch.float32, 5)[:, 0]
    x = {"x": gates(kind, (rows, 2 * cols), dtype)}
    yield Case("swiglu", SwiGlu, x)
    yield Case("weighted swiglu", SwiGlu, x | {"probability": probability})
    if cols % 2 == 0:
        x = {"x": gates(kind, shape, dtype), "grad": matrix("normal", (rows, cols // 2), dtype, 1)}
        yield Case("swiglu gradient", SwiGluGradient, x)
        yield Case("weighted swiglu gradient", SwiGluGradient, x | {"probability": probability})
    x = matrix(kind, shape, dtype)
    rstd = matrix("wide", (rows, 1), torch.float32, 2)[:, 0].abs()
    for gamma_dtype in (torch.float32, dtype):
        gamma = matrix("normal", (1, cols), gamma_dtype, 3)[0]
        tensors = {"x": x, "rstd": rstd, "gamma": gamma}
        yield Case(f"rms norm by {gamma_dtype}", RmsNorm, tensors)
        yield Case(f"zero-centered rms norm by {gamma_dtype}", _zero_centered, tensors)


def gathered_cases(shape: Pair, dtype: torch.dtype, kind: str) -> Iterator[Case]:
    """Rows of a matrix of another height, and of what is computed from it: some twice, some of them none."""
    rows, cols = shape
    for index_dtype, height in ((torch.int32, rows // 2 + 1), (torch.int64, 2 * rows)):
        index = torch.randint(-3, height + 3, (rows,), generator=torch.Generator().manual_seed(4)).to(index_dtype)
        if rows > 4:
            index[2:4] = torch.tensor([torch.iinfo(index_dtype).min, torch.iinfo(index_dtype).max])
        x = {"of": matrix(kind, (height, cols), dtype), "index": index}
        yield Case(f"rows by {index_dtype}", Gathered, x)
    few = ("weighted swiglu", "weighted swiglu gradient", f"rms norm by {dtype}")
    for case in in_order_cases((height, cols), dtype, kind):
        if case.name in few:
            yield Case(f"rows of {case.name}", partial(_gathered, case.make), case.tensors | {"index": index})


def _gathered(make: Callable[..., Source], *, index: Tensor, **tensors: Tensor) -> Gathered:
    return Gathered(make(**tensors), index)


def _zero_centered(**tensors: Tensor) -> RmsNorm:
    return RmsNorm(**tensors, zero_centered=True)
