"""What is put together from rectangles, or from the chunks that ranks gathered, and calls that do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from te_dist import ops
from te_dist.ops.assemble import Chunking

# Rows in front of the first one in its grain, rows, rows of a chunk, rows behind a value.
CHUNKINGS = [
    Chunking(0, 64, 16, 1),
    Chunking(0, 60, 16, 1),
    Chunking(0, 60, 16, 4),
    Chunking(3, 50, 7, 4),
    Chunking(0, 40, 3, 16),
    Chunking(5, 40, 40, 16),
    Chunking(1, 9, 1, 2),
]


def random_bytes(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def gathered_from(whole: Tensor, chunking: Chunking, dim: int, beside: tuple[int, int, int]) -> Tensor:
    """(chunks, bytes): of each chunk the values that its rows touch.

    Args:
        beside: bytes in front of and behind the values of each chunk, and how many more chunks there are.
    """
    values = (torch.arange(chunking.extent) + chunking.phase) // chunking.grain
    chunks = [
        whole.index_select(dim, rows.unique()).contiguous().flatten().view(torch.uint8)
        for rows in values.split(chunking.length)
    ]
    before, behind, more = beside
    longest = max(map(len, chunks))
    out = random_bytes((len(chunks) + more, before + longest + behind), 2)
    for row, chunk in zip(out, chunks, strict=False):
        row[before : before + len(chunk)] = chunk
    return out[:, before:]


def whole_of(chunking: Chunking, dim: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A tensor with that many values along `dim`, and `shape` along the others."""
    extents = list(shape)
    extents.insert(dim, chunking.num_values)
    return random_bytes((*extents[:2], extents[2] * dtype.itemsize), 1).view(dtype)


def assembled() -> Iterator[tuple[str, Callable[..., None], dict[str, Any], dict[str, Tensor], bool]]:
    """Name, op, inputs and outputs of calls, and that the CPU writes the same bytes."""
    for heights, width, shift in (([64, 64, 64], 512, 0), ([5, 0, 9], 7, 1), ([1] * 60, 48, 0)):
        wires = [random_bytes((height, width + shift), height)[:, :width] for height in heights]
        starts = [sum(heights[:i]) for i in range(len(heights))]
        inputs = dict(wires=wires, row_starts=starts, col_starts=[0] * len(heights))
        out = torch.zeros(shift + sum(heights) * (width + 2), dtype=torch.uint8)[shift:].view(-1, width + 2)
        yield f"assemble {heights[:3]} {width}", ops.assemble, inputs, dict(out=out), True
    for chunking, dim, (shape, dtype) in product(
        CHUNKINGS, range(3), (((3, 40), torch.uint8), ((2, 48), torch.float32), ((1, 33), torch.bfloat16))
    ):
        whole = whole_of(chunking, dim, shape, dtype)
        gathered = gathered_from(whole, chunking, dim, (16, 5 if dtype == torch.uint8 else 16, 2))
        out = torch.zeros(*whole.shape[:2], whole.shape[2] + 16, dtype=dtype)[..., : whole.shape[2]]
        inputs = dict(gathered=gathered, chunking=chunking, dim=dim)
        name = f"gathered chunks {tuple(chunking)} {dim} {dtype}"
        yield name, ops.assemble_chunks, inputs, dict(out=out), True
