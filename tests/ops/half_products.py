"""Products of bf16 and fp16 matrices, each as it lies in memory, and sums of parts, as arguments of ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from te_dist import ops

SUMMED = ((1, 1), (1, 0), (0, 1), (0, 0))
# (M, N, K): of tiles, of few columns, odd ones, of single ones, and sums of nothing.
SHAPES = [(256, 128, 192), (300, 16, 2048), (33, 5, 45), (7, 60, 1), (1, 1, 8), (5, 3, 0)]


def whole_numbers(rows: int, cols: int, dtype: torch.dtype, *, seed: int) -> Tensor:
    """Of which few thousand products add up exactly, in any order; rows lie apart."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, (rows, cols + 8), generator=generator).to(dtype)[:, :cols]


def operands(shape: tuple[int, int, int], summed: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`a` and `b`, as `ops.gemm_half` takes them."""
    rows, cols, depth = shape
    kept = zip((rows, cols), summed, strict=True)
    a, b = (whole_numbers(*((n, depth) if dim else (depth, n)), dtype, seed=n) for n, dim in kept)
    return a, b


def wanted(a: Tensor, b: Tensor, summed: tuple[int, int]) -> Tensor:
    """Their product in float64."""
    left, right = (x.double() if dim else x.double().t() for x, dim in zip((a, b), summed, strict=True))
    return left @ right.t()


def half_products() -> Iterator[tuple[str, Callable[..., None], dict[str, Any], dict[str, Tensor], bool]]:
    """Name, op, inputs and outputs of calls, and whether the CPU writes the same bytes."""
    for shape, summed, dtype in product(SHAPES[:4], SUMMED, (torch.bfloat16, torch.float16)):
        (a, b), added = operands(shape, summed, dtype), summed == (0, 0)
        out = torch.zeros(shape[:2], dtype=torch.float32 if added else dtype)
        given = dict(a=a, b=b, summed_dims=summed, accumulate=added)
        yield f"product {shape} {summed} {dtype}", ops.gemm_half, given, dict(out=out), False
    shapes = ((2, 70, 45), (5, 33, 64), (3, 1, 1), (1, 8, 12), (0, 0, 3))
    for (parts, rows, cols), dtype in product(shapes, (torch.float32, torch.bfloat16, torch.float16)):
        x = torch.randn(parts * rows, cols, generator=torch.Generator().manual_seed(1))
        for apart, added in ((0, False), (8, dtype == torch.float32)):
            out = torch.ones(rows, cols + apart, dtype=dtype)[:, :cols]
            name = f"{parts} parts {rows} {cols} {dtype} {apart}"
            yield name, ops.add_parts, dict(x=x, accumulate=added), dict(out=out), True
