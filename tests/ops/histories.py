"""Histories of amaxes, as arguments of ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from te_dist import ops

WIDTHS = ([3, 1, 70], [2], [2] * 40, [4, 0, 32])  # columns of each module
LENGTHS = (300, 1, 2, 5, 1024)
SPECIAL = torch.tensor([0.0, float("inf"), float("nan"), 1e-40, torch.finfo(torch.float32).max, 3.0, 0.0])


def amaxes(*shape: int, seed: int) -> Tensor:
    """Of several orders of magnitude; some are special."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator).exp()
    chosen = torch.randint(0, 4 * len(SPECIAL), shape, generator=generator)
    return torch.where(chosen < len(SPECIAL), SPECIAL[chosen % len(SPECIAL)], values)


def module(length: int, width: int, *, seed: int) -> dict[str, Tensor]:
    """What one module keeps."""
    return {
        "histories": amaxes(length, width, seed=seed),
        "running": amaxes(width, seed=seed + 1),
        "scales": torch.arange(width) + 7.0,
        "scaled_max": torch.tensor([448.0, 57344.0])[torch.arange(width) % 2],
    }


def as_lists(modules: Sequence[dict[str, Tensor]]) -> dict[str, list[Tensor]]:
    """What modules keep, as ops take it."""
    return {name: [its[name] for its in modules] for name in modules[0]}


def advanced_histories() -> Iterator[tuple[str, Callable[..., None], dict[str, Any], dict[str, Tensor]]]:
    """Name, op, inputs and outputs of calls; tensors are named by their place in a list."""
    for algo in ("max", "most_recent"):
        for length in LENGTHS:
            for widths in WIDTHS:
                given: dict[str, Any] = {"algo": algo}
                written: dict[str, Tensor] = {}
                for index, width in enumerate(widths):
                    for name, tensor in module(length, width, seed=index).items():
                        (given if name == "scaled_max" else written)[f"{name}[{index}]"] = tensor
                yield f"histories {algo} {length} {len(widths)}", of_modules(ops.advance_histories), given, written


def of_modules(op: Callable[..., None]) -> Callable[..., None]:
    """An op on lists, with their tensors one by one."""

    @wraps(op)
    def call(*, algo: str, **tensors: Tensor) -> None:
        lists: dict[str, list[Tensor]] = {}
        for name, tensor in tensors.items():
            lists.setdefault(name.partition("[")[0], []).append(tensor)
        op(**lists, algo=algo)

    return call
