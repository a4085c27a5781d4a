"""What the block quantizers write: up to two directions, each with its tile, data and scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from te_dist.formats.region import Pair
from te_dist.ops._checks import check_choice, check_output, check_plane, grid_shape


class Planes(TypedDict, total=False):
    """Keywords of the two directions. A direction without data is not written.

    *_tile: (rows, cols) that share a scale.
    *_amax: f32 on the tile grid, replaces the amax that the kernel would find.
    *_data: u8 codes.  *_scale: logical (row, col) view of the scales.
    """

    row_tile: Pair
    row_amax: Tensor | None
    row_data: Tensor | None
    row_scale: Tensor | None
    col_tile: Pair
    col_amax: Tensor | None
    col_data: Tensor | None
    col_scale: Tensor | None


@dataclass(frozen=True)
class Wanted:
    """What one direction must look like. `length` is the extent of a tile along the direction it is a run in."""

    side: str  # "row" or "col"
    tile_length: int
    data_shape: Pair
    scale_dtype: torch.dtype
    scale_per_tile: bool  # else one scale for every row (or column) that a tile spans

    @property
    def run(self) -> Pair:
        return (1, self.tile_length) if self.side == "row" else (self.tile_length, 1)


def check_direction(planes: Planes, wanted: Wanted, x: Tensor, phase: Pair) -> None:
    """Raises ValueError where the buffers of a direction do not fit `x` (rows, cols)."""
    side = wanted.side
    data, scale, amax = (planes.get(f"{side}_{part}") for part in ("data", "scale", "amax"))
    if data is None:
        return
    if scale is None:
        raise ValueError(f"{side}_scale: got None beside {side}_data; a direction is written with its scales")
    tile = planes.get(f"{side}_tile") or (0, 0)
    check_choice(f"{side}_tile", tuple(tile), (wanted.run, (wanted.tile_length, wanted.tile_length)))
    check_output(f"{side}_data", data, torch.uint8, wanted.data_shape)
    scale_tile = tile if wanted.scale_per_tile else wanted.run
    check_plane(f"{side}_scale", scale, wanted.scale_dtype, grid_shape(x.shape, phase, scale_tile))
    if amax is not None:
        check_plane(f"{side}_amax", amax, torch.float32, grid_shape(x.shape, phase, tile))


def flat(planes: Planes, side: str) -> tuple[list[int], Tensor | None, Tensor | None, Tensor | None]:
    """(tile, amax, data, scale) of one direction, in the order of the schemas."""
    tile = planes.get(f"{side}_tile") or (1, 1)
    return list(tile), planes.get(f"{side}_amax"), planes.get(f"{side}_data"), planes.get(f"{side}_scale")
