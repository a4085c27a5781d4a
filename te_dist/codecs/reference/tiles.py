"""A matrix and the grid of its scale tiles. Tiles are anchored at the whole matrix; `phase` says where `x` starts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from te_dist.formats import WHOLE, Span
from te_dist.formats.region import Pair


def tiles(x: Tensor, tile: Pair, phase: Pair = (0, 0)) -> Tensor:
    """`x` (m, k) as (grid_m, tile_m, grid_k, tile_k), every element at its place in its tile, zeros outside `x`."""
    shape: list[int] = []
    margins: list[int] = []
    for length, block, start in zip(x.shape, tile, phase, strict=True):
        count = len(Span(start, length).blocks(block))
        extent, before = (max(length, 1), 0) if block == WHOLE else (block, start % block * (count > 0))
        shape += [count, extent]
        # functional.pad names the last dimension first
        margins = [before, count * extent - before - length, *margins]
    return functional.pad(x, margins).reshape(shape)


def spread(grid: Tensor, shape: Sequence[int], tile: Pair, phase: Pair = (0, 0)) -> Tensor:
    """For every element of a matrix of `shape`, the value of `grid` (grid_m, grid_k) for the tile it lies in."""
    for dim, (length, extent, offset) in enumerate(zip(shape, tile, phase, strict=True)):
        index = torch.arange(offset, offset + length)
        index = index // extent - offset // extent if extent != WHOLE else torch.zeros_like(index)
        grid = grid.index_select(dim, index)
    return grid


def tile_amax(x: Tensor, tile: Pair, phase: Pair = (0, 0)) -> Tensor:
    """Largest magnitude in every tile, f32 (grid_m, grid_k). NaN does not enter, infinity does; of nothing it is 0."""
    magnitude = torch.where(x.isnan(), torch.zeros_like(x), x.abs()).float()
    return tiles(magnitude, tile, phase).amax((1, 3))
