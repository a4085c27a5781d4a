"""MXFP8: FP8 with a power-of-two scale byte for a run or a square of values, none of which has rows of two groups."""

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
from te_dist.ops.group_table import TILE as GROUP_TILE
from te_dist.ops.quantize_mxfp8 import TILE, quantize_mxfp8
from te_dist.ops.source import Source, flat_source

RUNS = {"row": (1, TILE), "col": (TILE, 1)}
SQUARE = (TILE, TILE)
PER_GROUP_TILE = GROUP_TILE // TILE


class GroupedMxFp8Planes(TypedDict, total=False):
    """Keywords of the two directions. A direction without data is not written. P: see `padded_rows`.

    row_tile: (1, 32) or (32, 32).  row_data: u8 codes (T, K).  row_scale: u8 (at least T, at least ceil(K / 32)).
    col_tile: (32, 1) or (32, 32).  col_data: u8 codes (at least P, K).  col_scale: u8 (at least P / 32, at least K).
    """

    row_tile: Pair
    row_data: Tensor | None
    row_scale: Tensor | None
    col_tile: Pair
    col_data: Tensor | None
    col_scale: Tensor | None


KEYS = ("row_tile", "row_data", "row_scale", "col_tile", "col_data", "col_scale")  # in the order of the schema


@taped
@takes(GroupedMxFp8Planes)
def grouped_quantize_mxfp8(
    x: Tensor | Source,
    *,
    table: Tensor,
    fp8: str,
    noop: Tensor | None = None,
    **planes: Unpack[GroupedMxFp8Planes],
) -> None:
    """Quantizes every group of rows as `quantize_mxfp8` does it alone; both directions in one pass over `x`.

    What is columnwise begins, for each group, at a tile of 128 rows of its own, in the order of groups and without a
    gap between tiles; codes and scales behind a group's last row, up to the end of its tile, are zero. What belongs to
    rows behind the last group, and to tiles behind the last, is left as it is.

    Args:
        x: (T, K), fp32, bf16 or fp16; or a source. Of `Summed`, f32 (at least P / 128, K), panels are these tiles.
        table: int32 (4, G + 1), see `group_table`.
        fp8: "e4m3" or "e5m2".
        noop: int32 or fp32, one element on the device of `x`: nothing is written where any of its bits is set.
        planes: see `GroupedMxFp8Planes`; a square's exponent is repeated.

    Raises:
        ValueError: a type or shape that does not fit.
    """
    tiles, (rows, cols) = check_groups(x, table), x.shape
    check_choice("fp8", fp8, FP8)
    check_noop(noop, x)
    row_data, col_data = planes.get("row_data"), planes.get("col_data")
    if row_data is not None:
        check_output("row_data", row_data, torch.uint8, (rows, cols))
        _check_scale("row", planes, (rows, -(-cols // TILE)))
    if col_data is not None:
        check_padded("col_data", col_data, cols, tiles=tiles, per_tile=GROUP_TILE, dim=0)
        _check_scale("col", planes, (tiles * PER_GROUP_TILE, cols))
    outputs = (planes.get(key, (1, 1) if "tile" in key else None) for key in KEYS)
    torch.ops.te_dist.grouped_quantize_mxfp8(*flat_source(x), table, fp8, *outputs, noop)


def _check_scale(side: str, planes: GroupedMxFp8Planes, grid: Pair) -> None:
    scale = planes.get(f"{side}_scale")
    if scale is None:
        raise ValueError(f"{side}_scale: got None beside {side}_data; a direction is written with its scales")
    check_choice(f"{side}_tile", tuple(planes.get(f"{side}_tile", ())), (RUNS[side], SQUARE))
    check_rows(f"{side}_scale", scale, (torch.uint8,), grid, at_least=True)


def _cpu(
    x: Tensor, source: str, beside: list[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    table, fp8, row_tile, row_data, row_scale, col_tile, col_data, col_scale, noop = rest
    if is_set(noop):
        return
    matrix, rule = matrix_of(x, source, beside), dict(phase=(0, 0), fp8=fp8)
    cols, across = matrix.shape[1], -(-matrix.shape[1] // TILE)
    for _, group in groups_of(table, len(matrix)):
        if row_data is not None:
            planes = dict(row_data=row_data[group.rows], row_scale=row_scale[group.rows, :across])
            quantize_mxfp8(matrix[group.rows], **rule, row_tile=row_tile, **planes)
        if col_data is not None:
            scale = col_scale[group.padded(PER_GROUP_TILE), :cols]
            planes = dict(col_data=col_data[group.padded()], col_scale=scale)
            quantize_mxfp8(with_padding(matrix, group), **rule, col_tile=col_tile, **planes)
    sum_groups(matrix, table, sums)
    sum_rows((x, source, beside), table, row_sums)


register(
    "grouped_quantize_mxfp8(Tensor x, str source, Tensor[] beside, Tensor(s!)? panel_sums, Tensor(t!)? row_sums, "
    "Tensor table, str fp8, int[] row_tile, Tensor(a!)? row_data, Tensor(b!)? row_scale, "
    "int[] col_tile, Tensor(c!)? col_data, Tensor(d!)? col_scale, Tensor? noop) -> ()",
    _cpu,
    kernels.grouped_quantize_mxfp8,
)
