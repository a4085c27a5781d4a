"""Ranks that hold parts of one matrix agree on the amaxes they share: all of them in one MAX reduction.

A per-tensor amax is shared by every part, the amax of a tile by the parts that a cut through it leaves on either side.
Which tiles these are follows from the cuts alone, so that every rank lays out the same buffer without asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from te_dist.formats import WHOLE, Format, Partition, Region, Span
from te_dist.formats.region import Pair
from te_dist.tensor import Amaxes, QuantizedStorage, find_amaxes


@dataclass(frozen=True)
class Entry:
    """One part and what it brings to the agreement: the amaxes of its own values, replaced by those agreed on."""

    amaxes: Amaxes
    region: Region
    partition: Partition


@dataclass(frozen=True)
class _Slots:
    """Places of one amax grid in the reduced buffer.

    Attributes:
        size: number of shared amaxes of the matrix; the same on every rank.
        own: flat indices of the shared ones in the grid of this part.
        slot: their places among the `size`.
    """

    size: int
    own: Tensor
    slot: Tensor


def agree(entries: Sequence[Entry], groups: Sequence[dist.ProcessGroup]) -> None:
    """Replaces, in place, every shared amax of all `entries` by its maximum over `groups`.

    Collective: every rank of every group calls it with the same matrices in the same order. There is one reduction per
    group, and none where nothing is shared.
    """
    placed = [(grid, _slots(tile, e.region, e.partition)) for e in entries for tile, grid in _grids(e)]
    total = sum(slots.size for _, slots in placed)
    if not total or not groups:
        return
    buffer = torch.zeros(total, dtype=torch.float32, device=placed[0][0].device)
    segments = buffer.split([slots.size for _, slots in placed])
    for (grid, slots), segment in zip(placed, segments, strict=True):
        segment[slots.slot] = grid.view(-1)[slots.own]
    for group in groups:
        dist.all_reduce(buffer, dist.ReduceOp.MAX, group=group)
    for (grid, slots), segment in zip(placed, segments, strict=True):
        grid.view(-1)[slots.own] = segment[slots.slot]


def shares_scales(format: Format, partition: Partition) -> bool:
    """Whether any amax of `format` is shared between parts of `partition`."""
    return any(
        _shared_blocks(partition.rows, tile[0]) or _shared_blocks(partition.cols, tile[1])
        for direction in format.directions
        for tile in format[direction].codec.amax_tiles
    )


def quantize_parts(
    parts: Sequence[tuple[QuantizedStorage, Tensor, Partition]], groups: Sequence[dist.ProcessGroup]
) -> None:
    """Quantizes each part's values into its storage, as the bytes of the whole would be. Collective, like `agree`."""
    found = [
        find_amaxes(values, storage.format, storage.region) if shares_scales(storage.format, partition) else {}
        for storage, values, partition in parts
    ]
    agree([Entry(f, s.region, p) for f, (s, _, p) in zip(found, parts, strict=True)], groups)
    for amaxes, (storage, values, _) in zip(found, parts, strict=True):
        storage.quantize_(values, amaxes)


def _grids(entry: Entry) -> list[tuple[Pair, Tensor]]:
    return [
        (tile, grid)
        for codec, grids in entry.amaxes.items()
        for tile, grid in zip(codec.amax_tiles, grids, strict=True)
    ]


def _shared_blocks(spans: Sequence[Span], block: int) -> tuple[int, ...]:
    """Blocks, counted from the start of the whole, that more than one of `spans` holds a part of."""
    if block == WHOLE:
        return (0,) if len(spans) > 1 else ()
    holders: dict[int, int] = {}
    for span in spans:
        blocks = span.blocks(block)
        for edge in {blocks.start, blocks.stop - 1} if len(blocks) else ():
            holders[edge] = holders.get(edge, 0) + 1
    return tuple(sorted(edge for edge, count in holders.items() if count > 1))


@lru_cache(maxsize=4096)
def _slots(tile: Pair, region: Region, partition: Partition) -> _Slots:
    extent = [_extent(spans, block) for spans, block in zip((partition.rows, partition.cols), tile, strict=True)]
    shared = [_shared_blocks(spans, block) for spans, block in zip((partition.rows, partition.cols), tile, strict=True)]
    size = len(shared[0]) * len(extent[1]) + len(extent[0]) * len(shared[1])
    rows, cols = region.blocks(tile)
    own, slot = [], []
    for at, row in enumerate(shared[0]):  # whole rows of tiles that a row cut goes through
        if rows.start <= row < rows.stop:
            own += [(row - rows.start) * len(cols) + c for c in range(len(cols))]
            slot += [at * len(extent[1]) + c - extent[1].start for c in range(cols.start, cols.stop)]
    offset = len(shared[0]) * len(extent[1])
    for at, col in enumerate(shared[1]):  # whole columns of tiles that a column cut goes through
        if cols.start <= col < cols.stop:
            own += [r * len(cols) + col - cols.start for r in range(len(rows))]
            slot += [offset + (r - extent[0].start) * len(shared[1]) + at for r in range(rows.start, rows.stop)]
    return _Slots(size, torch.tensor(own, dtype=torch.long), torch.tensor(slot, dtype=torch.long))


def _extent(spans: Sequence[Span], block: int) -> Span:
    """All blocks that `spans` touch together."""
    blocks = [span.blocks(block) for span in spans]
    start = min(b.start for b in blocks)
    return Span(start, max(b.stop for b in blocks) - start)
