"""Calls of the transpose of scales of squares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from te_dist import ops

# Lines of codes and columns, elements between the lines of the transpose and their ends, and in front of the matrices.
CASES = (
    ((256, 256), 0, 0),
    ((96, 4100), 4, 0),
    ((40, 70), 1, 1),
    ((3, 48, 528), 3, 0),
    ((2, 16, 16), 0, 3),
    ((0, 32), 4, 0),
)
SQUARE = 16


def turned_squares() -> Iterator[tuple[str, Callable[..., None], dict[str, Any], dict[str, Any]]]:
    """(name, op, inputs, outputs)."""
    for shape, padding, shift in CASES:
        *matrices, rows, cols = shape
        wide, long = -(-cols // SQUARE), -(-rows // SQUARE) + padding
        src, out = _bytes(shift, (*matrices, rows, wide)), _bytes(shift, (*matrices, cols, long))
        yield f"transpose {shape} squares", ops.transpose, dict(src=src, bits=8, square=SQUARE), dict(out=out)


def _bytes(shift: int, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (shift + count,), dtype=torch.uint8, generator=generator)[shift:].view(shape)
