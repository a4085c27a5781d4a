"""Experts that are hard to sort, and what comes of them by Python's own sorting."""

from __future__ import annotations

import torch
from torch import Tensor


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


def wanted(experts: Tensor, num_experts: int, first: int | None) -> dict[str, Tensor]:
    """What they become."""
    begin = first or 0
    keys = [key - begin if 0 <= key - begin < num_experts else num_experts for key in experts.flatten().tolist()]
    order = sorted(range(len(keys)), key=lambda copy: keys[copy])  # is stable
    want = sorted_outputs(experts, num_experts)
    want["choices"] = torch.tensor(order, dtype=torch.int64)
    want["index"] = want["choices"] // experts.shape[1]
    want["positions"].view(-1)[want["choices"]] = torch.arange(len(order))
    if first is not None:
        want["positions"].view(-1)[torch.tensor(keys, dtype=torch.int64) == num_experts] = len(keys)
    want["counts"] = torch.tensor([keys.count(expert) for expert in range(num_experts)], dtype=torch.int64)
    return want
