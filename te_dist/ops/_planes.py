"""What the block quantizers write: up to two directions, each with its tile, data and scales."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from te_dist.formats.region import Pair
from te_dist.ops._checks import check_choice, check_dtype, check_output, check_plane, grid_shape
from te_dist.ops.source import Source


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


class TensorPlanes(TypedDict, total=False):
    """Keywords of the two directions of a format with one scale. A direction without data is not written.

    *_data: u8 codes, (rows, cols) and transposed (cols, rows).
    *_scale: f32, one element: the inverse of the scale, by which a code is multiplied.
    """

    row_data: Tensor | None
    row_scale: Tensor | None
    col_data: Tensor | None
    col_scale: Tensor | None


class Wanted(NamedTuple):
    """What one direction must look like. `length` is the extent of a tile along the direction it is a run in."""

    side: str  # "row" or "col"
    tile_length: int
    data_shape: Pair
    scale_dtype: torch.dtype
    scale_per_tile: bool  # else one scale for every row (or column) that a tile spans

    @property
    def run(self) -> Pair:
        return (1, self.tile_length) if self.side == "row" else (self.tile_length, 1)


# By side, the keywords of a direction in the order of the schemas.
KEYS = {side: tuple(f"{side}_{part}" for part in ("tile", "amax", "data", "scale")) for side in ("row", "col")}


def check_direction(planes: Planes, wanted: Wanted, x: Tensor | Source, phase: Pair) -> None:
    """Raises ValueError where the buffers of a direction do not fit `x` (rows, cols)."""
    keys = KEYS[wanted.side]
    tile, amax, data, scale = map(planes.get, keys)
    if data is None:
        return
    if scale is None:
        raise ValueError(f"{keys[3]}: got None beside {keys[2]}; a direction is written with its scales")
    tile, run = tuple(tile or (0, 0)), wanted.run
    if tile != run:
        check_choice(keys[0], tile, (run, (wanted.tile_length, wanted.tile_length)))
    check_output(keys[2], data, torch.uint8, wanted.data_shape)
    scale_tile = tile if wanted.scale_per_tile else run
    check_plane(keys[3], scale, wanted.scale_dtype, grid_shape(x.shape, phase, scale_tile))
    if amax is not None:
        check_plane(keys[1], amax, torch.float32, grid_shape(x.shape, phase, tile))


def check_scalar(name: str, tensor: Tensor | None) -> None:
    """None, or one fp32 element."""
    if tensor is None:
        return
    check_dtype(name, tensor, (torch.float32,))
    if tensor.numel() != 1:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, wanted one element; pass that of the whole tensor")


def check_tensor_planes(planes: TensorPlanes, x: Tensor | Source) -> None:
    """Raises ValueError where the buffers of a format with one scale do not fit `x` (rows, cols)."""
    if planes.get("row_data") is None and planes.get("col_data") is None:
        raise ValueError("row_data: got None, as for col_data; pass at least one of the two")
    rows, cols = x.shape
    for side, shape in (("row", (rows, cols)), ("col", (cols, rows))):
        check_scalar(f"{side}_scale", planes.get(f"{side}_scale"))
        data = planes.get(f"{side}_data")
        if data is not None:
            check_output(f"{side}_data", data, torch.uint8, shape)


TENSOR_OUTPUTS = ("row_data", "row_scale", "col_data", "col_scale")  # in the order of the schemas


def flat(planes: Planes, side: str) -> tuple[Pair, Tensor | None, Tensor | None, Tensor | None]:
    """(tile, amax, data, scale) of one direction, in the order of the schemas."""
    tile, amax, data, scale = map(planes.get, KEYS[side])
    return tile or (1, 1), amax, data, scale
