"""Operands of products in groups of small integers: tensor cores sum them without an error, in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.kernels import grouped_whole
from te_dist.kernels.grouped_whole import Split
from tests.ops.groups import FP8

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Kind(NamedTuple):
    """What is multiplied: "bf16", "fp16", or FP8 types; in products of rows, how B lies, and how FP8 is summed."""

    a: str
    b: str
    summed_dim: int = 1
    fast: bool = False

    @property
    def is_half(self) -> bool:
        return self.a in HALVES


KINDS = [Kind("bf16", "bf16"), Kind("bf16", "bf16", 0), Kind("fp16", "fp16", 0), Kind("e4m3", "e5m2")]
KINDS.append(Kind("e5m2", "e4m3", fast=True))


SPLITS = [Split(cols, cluster, band=3) for cols, cluster in product((256, 128), (1, 2))]


def choose(monkeypatch: pytest.MonkeyPatch, split: Split) -> None:
    """Cuts all products so; those in parts into the widest tiles of theirs that are no wider."""
    for name in ("products_split", "sums_split"):
        monkeypatch.setattr(grouped_whole, name, lambda *_, **__: split)
    in_parts = replace(split, cols=min(192, split.cols))
    for name in ("products_in_parts_split", "sums_in_parts_split"):
        monkeypatch.setattr(grouped_whole, name, lambda *_, **__: in_parts)


def integers(shape: Sequence[int], seed: int, device: str) -> Tensor:
    """From -2 to 2, in float64."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(-2, 3, tuple(shape), generator=generator, device=device).double()


def stored(values: Tensor, kind: str) -> Tensor:
    """As an op takes them."""
    return values.to(HALVES[kind]) if kind in HALVES else values.to(FP8[kind]).view(torch.uint8)


def scales(groups: int, device: str) -> tuple[Tensor, Tensor]:
    """Of A one for all, of B one of each group; powers of two."""
    return torch.tensor([0.25], device=device), torch.exp2(torch.arange(groups, device=device) % 5 - 2.0)


def multiply(kind: Kind, a: Tensor, b: Tensor, scale: tuple[Tensor, Tensor], **rest: object) -> None:
    """Products of rows of stored operands."""
    rest = dict(bias=None, row_factor=None, accumulate=False) | rest
    if kind.is_half:
        return ops.grouped_gemm_half(a, b, summed_dim=kind.summed_dim, **rest)
    return ops.grouped_gemm_float8_tensor(a, scale[0], b, scale[1], fp8=(kind.a, kind.b), fast=kind.fast, **rest)


def sum_rows(kind: Kind, a: Tensor, b: Tensor, scale: tuple[Tensor, Tensor], **rest: object) -> None:
    """Products that sum over rows, of stored operands."""
    if kind.is_half:
        return ops.grouped_wgrad_half(a, b, **rest)
    return ops.grouped_wgrad_float8_tensor(a, scale[0], b, scale[1], fp8=(kind.a, kind.b), **rest)


def padded(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """(T, M) as FP8 is summed over: (M, P), groups at tiles of 128 columns of their own, with zeros behind."""
    parts = [torch.nn.functional.pad(part.t(), (0, -part.shape[0] % 128)) for part in values.split(list(sizes))]
    return torch.cat([*parts, values.new_zeros(values.shape[1], 128)], 1)


def spans(sizes: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(group, its rows)."""
    begin = 0
    for group, size in enumerate(sizes):
        yield group, slice(begin, begin + size)
        begin += size


class RowsCase:
    """Products of rows, and what they should be. Rows behind the last group, and matrices of empty groups, are NaN."""

    def __init__(self, kind: Kind, sizes: Sequence[int], cols: int, depth: int, device: str = "cpu") -> None:
        groups, rows = len(sizes), sum(sizes)
        a = integers((rows + 9, depth), 1, device)
        matrices = integers((groups, cols, depth), 2, device)
        self.scale = scales(groups, device)
        self.bias, self.factor = torch.randn(groups, cols, device=device), torch.rand(rows + 9, device=device)
        self.want = torch.zeros(rows, cols, dtype=torch.float64, device=device)
        for group, its in spans(sizes):
            scale = 1.0 if kind.is_half else (self.scale[0] * self.scale[1][group]).double()
            self.want[its] = a[its] @ matrices[group].t() * scale
            if sizes[group] == 0:
                matrices[group] = torch.nan
        a[rows:] = torch.nan
        self.a = stored(a, kind.a)
        b = matrices if kind.summed_dim == 1 else matrices.transpose(1, 2)
        self.b = stored(b.reshape(-1, b.shape[2]).contiguous(), kind.b)
        self.owner = torch.repeat_interleave(torch.arange(groups), torch.tensor(sizes)).to(device)

    def ended(self) -> Tensor:
        """With bias and factors."""
        return (self.want + self.bias.double()[self.owner]) * self.factor[: len(self.want), None].double()


class SumsCase:
    """Sums over rows, and what they should be. Rows behind the last group are NaN; if it `poisons`, the largest's too.

    Attributes:
        right: groups whose sums are not NaN.
    """

    def __init__(  # noqa: PLR0913  (each is one property of the case)
        self,
        kind: Kind,
        sizes: Sequence[int],
        rows: int,
        cols: int,
        device: str = "cpu",
        *,
        poisons: bool,
    ) -> None:
        groups, total = len(sizes), sum(sizes)
        a, b = integers((total, rows), 3, device), integers((total, cols), 4, device)
        self.scale = scales(groups, device)
        self.want = torch.zeros(groups, rows, cols, dtype=torch.float64, device=device)
        poisoned = max(range(groups), key=sizes.__getitem__) if poisons else None
        self.right = [group for group in range(groups) if group != poisoned or sizes[group] == 0]
        for group, its in spans(sizes):
            scale = 1.0 if kind.is_half else (self.scale[0] * self.scale[1][group]).double()
            self.want[group] = a[its].t() @ b[its] * scale
            if group == poisoned:
                a[its], b[its] = torch.nan, torch.nan
        if kind.is_half:
            a, b = (torch.nn.functional.pad(side, (0, 0, 0, 9), value=torch.nan) for side in (a, b))
        else:
            a, b = padded(a, sizes), padded(b, sizes)
        self.a, self.b = stored(a, kind.a), stored(b, kind.b)


def error_of_products(depth: int, *, fast: bool, device: str) -> float:
    """Of products of FP8 that sum over `depth` random values, relative to their size."""
    a, b = (torch.randn(extent, depth, device=device).to(FP8["e4m3"]) for extent in (45, 2 * 96))
    out, one = torch.empty(45, 96, device=device), torch.ones(1, device=device)
    table = torch.empty(4, 3, dtype=torch.int32, device=device)
    ops.group_table(torch.tensor([5, 45], device=device), rows=45, out=table)
    codes = (side.view(torch.uint8) for side in (a, b))
    multiply(Kind("e4m3", "e4m3", fast=fast), *codes, (one, one), table=table, out=out)
    members = b.double().chunk(2)
    return _relative(out, torch.cat([a[:5].double() @ members[0].t(), a[5:].double() @ members[1].t()]))


def error_of_sums(depth: int, device: str) -> float:
    """The same of products that sum over the rows of groups, of which one has `depth`, a multiple of 128."""
    a, b = (torch.randn(extent, depth + 128, device=device).to(FP8["e4m3"]) for extent in (40, 96))
    out, one = torch.empty(2 * 40, 96, device=device), torch.ones(1, device=device)
    table = torch.empty(4, 3, dtype=torch.int32, device=device)
    ops.group_table(torch.tensor([depth, depth + 128], device=device), rows=depth + 128, out=table)
    codes = (side.view(torch.uint8) for side in (a, b))
    sum_rows(Kind("e4m3", "e4m3"), *codes, (one, one), table=table, accumulate=False, out=out)
    return _relative(out[:40], a[:, :depth].double() @ b[:, :depth].double().t())


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())
