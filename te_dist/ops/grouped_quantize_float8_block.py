"""FP8 with one fp32 scale for a run of values or a square of them, none of which has rows of two groups."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.formats.region import Pair
from te_dist.ops._checks import FP8, check_choice, check_output, check_rows, takes
from te_dist.ops._groups import check_groups, check_padded, groups_of, matrix_of, sum_groups, sum_rows, with_padding
from te_dist.ops._library import register
from te_dist.ops._noop import check_noop, is_set
from te_dist.ops._taped import taped
from te_dist.ops.group_table import TILE
from te_dist.ops.quantize_float8_block import quantize_float8_block
from te_dist.ops.source import Source, flat_source

RUNS = {"row": (1, TILE), "col": (TILE, 1)}
SQUARE = (TILE, TILE)


class GroupedFloat8BlockPlanes(TypedDict, total=False):
    """Keywords of the two directions. A direction without data is not written. P: see `padded_rows`.

    row_tile: (1, 128) or (128, 128).  row_data: u8 codes (T, K).
    row_scale: f32 (ceil(K / 128), at least T), or (at least P / 128, at least ceil(K / 128)) for squares.
    col_tile: (128, 1) or (128, 128).  col_data: u8 codes (K, at least P).
    col_scale: f32 (at least P / 128, at least K), or (at least P / 128, at least ceil(K / 128)) for squares.
    """

    row_tile: Pair
    row_data: Tensor | None
    row_scale: Tensor | None
    col_tile: Pair
    col_data: Tensor | None
    col_scale: Tensor | None


KEYS = ("row_tile", "row_data", "row_scale", "col_tile", "col_data", "col_scale")  # in the order of the schema


@taped
@takes(GroupedFloat8BlockPlanes)
def grouped_quantize_float8_block(
    x: Tensor | Source,
    *,
    table: Tensor,
    fp8: str,
    pow2: bool,
    eps: float,
    noop: Tensor | None = None,
    **planes: Unpack[GroupedFloat8BlockPlanes],
) -> None:
    """Quantizes every group of rows as `quantize_float8_block` does it alone; both directions in one pass over `x`.

    Codes by columns begin, for each group, at a tile of 128 of their own, in the order of groups and without a gap
    between tiles; behind a group's last row, up to the end of its tile, they are zero. Squares count in the same tiles,
    in both directions. What belongs to rows behind the last group, and to tiles behind the last, is left as it is.

    Args:
        x: (T, K), fp32, bf16 or fp16; or a source. Of `Summed`, f32 (at least P / 128, K), panels are these tiles.
        table: int32 (4, G + 1), see `group_table`.
        fp8: "e4m3" or "e5m2".
        pow2: round scales down to a power of two.
        eps: lower bound of a tile's amax.
        noop: int32 or fp32, one element on the device of `x`: nothing is written where any of its bits is set.
        planes: see `GroupedFloat8BlockPlanes`.

    Raises:
        ValueError: a type or shape that does not fit.
    """
    tiles = check_groups(x, table)
    check_choice("fp8", fp8, FP8)
    check_noop(noop, x)
    _check_direction("row", planes, x, tiles)
    _check_direction("col", planes, x, tiles)
    outputs = (planes.get(key, (1, 1) if "tile" in key else None) for key in KEYS)
    torch.ops.te_dist.grouped_quantize_float8_block(*flat_source(x), table, fp8, pow2, eps, *outputs, noop)


def _check_direction(side: str, planes: GroupedFloat8BlockPlanes, x: Tensor | Source, tiles: int) -> None:
    tile, data, scale = (planes.get(f"{side}_{part}") for part in ("tile", "data", "scale"))
    if data is None:
        return
    if scale is None:
        raise ValueError(f"{side}_scale: got None beside {side}_data; a direction is written with its scales")
    tile = tuple(tile or ())
    check_choice(f"{side}_tile", tile, (RUNS[side], SQUARE))
    (rows, cols), across = x.shape, -(-x.shape[1] // TILE)
    if side == "row":
        check_output("row_data", data, torch.uint8, (rows, cols))
    else:
        check_padded("col_data", data, cols, tiles=tiles, per_tile=TILE)
    grid = (tiles, across if tile == SQUARE else cols)
    if tile == RUNS["row"]:
        grid = (across, rows)
    check_rows(f"{side}_scale", scale, (torch.float32,), grid, at_least=True)


def _cpu(
    x: Tensor, source: str, beside: list[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    table, fp8, pow2, eps, row_tile, row_data, row_scale, col_tile, col_data, col_scale, noop = rest
    if is_set(noop):
        return
    matrix, rule = matrix_of(x, source, beside), dict[str, Any](phase=(0, 0), fp8=fp8, pow2=pow2, eps=eps)
    cols, across = matrix.shape[1], -(-matrix.shape[1] // TILE)
    for _, group in groups_of(table, len(matrix)):
        if row_data is not None:
            is_run = tuple(row_tile) == RUNS["row"]
            scale = row_scale[:across, group.rows].t() if is_run else row_scale[group.tiles, :across]
            planes = dict(row_tile=row_tile, row_data=row_data[group.rows], row_scale=scale)
            quantize_float8_block(matrix[group.rows], **rule, **planes)
        if col_data is not None:
            padded = with_padding(matrix, group)
            codes = col_data.new_empty(cols, padded.shape[0])
            scale = col_scale[group.tiles, : cols if tuple(col_tile) == RUNS["col"] else across]
            quantize_float8_block(padded, **rule, col_tile=col_tile, col_data=codes, col_scale=scale)
            col_data[:, group.padded()] = codes
    sum_groups(matrix, table, sums)
    sum_rows((x, source, beside), table, row_sums)


register(
    "grouped_quantize_float8_block(Tensor x, str source, Tensor[] beside, "
    "Tensor(s!)? panel_sums, Tensor(t!)? row_sums, Tensor table, str fp8, bool pow2, float eps, "
    "int[] row_tile, Tensor(a!)? row_data, Tensor(b!)? row_scale, "
    "int[] col_tile, Tensor(c!)? col_data, Tensor(d!)? col_scale, Tensor? noop) -> ()",
    _cpu,
    kernels.grouped_quantize_float8_block,
)
