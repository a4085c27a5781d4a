"""Scores and experts that are hard to sort, and what comes of them by Python's own sorting."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def scores(rows: int, cols: int) -> Tensor:
    """f32 with equal values, both zeros, infinities and NaN of both signs."""
    generator = torch.Generator().manual_seed(rows * cols)
    x = torch.randint(-9, 10, (rows, cols), generator=generator).float() / 3
    x[::2, ::7], x[1::3, 1::5], x[2::5, 2::9] = 0.0, -0.0, torch.inf
    x[3::7, 3::4], x[4::9, ::6], x[4::9, 1::6] = -torch.inf, torch.nan, -torch.nan
    return x


def largest(x: Tensor, bias: Tensor | None, count: int) -> list[list[int]]:
    """Columns of the largest values: NaN above all, of equal ones the leftmost."""
    rows = (x if bias is None else x + bias).tolist()
    order = lambda row: sorted(range(len(row)), key=lambda col: (not math.isnan(row[col]), -row[col], col))  # noqa: E731
    return [order([0.0 if value == 0 else value for value in row])[:count] for row in rows]


def experts_of(rows: int, copies: int, num_experts: int) -> Tensor:
    """int64 (rows, copies), most of them skewed to few experts, some no expert's."""
    generator = torch.Generator().manual_seed(rows + num_experts)
    found = (torch.rand(rows, copies, generator=generator) ** 3 * (num_experts + 1)).long() - 1
    if rows > 8:
        found[3], found[5], found[7] = num_experts, torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min
    return found


def sorted_outputs(experts: Tensor, num_experts: int, fill: int = -1) -> dict[str, Tensor]:
    """Outputs of `ops.sort_by_expert`, poisoned."""
    shapes = dict(index=(experts.numel(),), choices=(experts.numel(),), positions=experts.shape, counts=(num_experts,))
    return {name: torch.full(shape, fill, dtype=torch.int64) for name, shape in shapes.items()}


def wanted(experts: Tensor, num_experts: int) -> dict[str, Tensor]:
    """What they become."""
    keys = [key if 0 <= key < num_experts else num_experts for key in experts.flatten().tolist()]
    order = sorted(range(len(keys)), key=lambda copy: keys[copy])  # is stable
    want = sorted_outputs(experts, num_experts)
    want["choices"] = torch.tensor(order, dtype=torch.int64)
    want["index"] = want["choices"] // experts.shape[1]
    want["positions"].view(-1)[want["choices"]] = torch.arange(len(order))
    want["counts"] = torch.tensor([keys.count(expert) for expert in range(num_experts)], dtype=torch.int64)
    return want
