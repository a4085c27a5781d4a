"""NVFP4 of groups of rows, below one fp32 amax for all groups or one for each."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.formats.region import Pair
from te_dist.ops._checks import check_choice, check_output, check_packed, check_rows, takes
from te_dist.ops._groups import (
    check_groups,
    check_padded,
    check_per_group,
    groups_of,
    matrix_of,
    place_of,
    sum_groups,
    sum_rows,
    with_padding,
)
from te_dist.ops._library import register
from te_dist.ops._noop import check_noop, is_set
from te_dist.ops._taped import taped
from te_dist.ops.group_table import TILE as GROUP_TILE
from te_dist.ops.quantize_nvfp4 import E4M3_MAX, FOUR_OVER_SIX, TILE, quantize_nvfp4
from te_dist.ops.source import Source, flat_source

RUNS = {"row": (1, TILE), "col": (TILE, 1)}
SQUARE = (TILE, TILE)
PER_GROUP_TILE = GROUP_TILE // TILE


class GroupedNvFp4Planes(TypedDict, total=False):
    """Keywords of the two directions. A direction without data is not written. P: see `padded_rows`.

    *_tensor_amax: f32, (1,), or (G,), that of each group.
    row_tile: (1, 16) or (16, 16).  row_data: u8, two codes in a byte, (T, K / 2).
    row_scale: u8 (at least T, at least ceil(K / 16)).
    col_tile: (16, 1) or (16, 16).  col_data: u8 (K, at least P / 2).  col_scale: u8 (at least K, at least P / 16).
    col_hadamard: sign mask of a Hadamard transform of the rows of each group, zeros behind its last, rounded to bf16,
    which the direction is of; None for none.
    """

    row_tile: Pair
    row_tensor_amax: Tensor | None
    row_data: Tensor | None
    row_scale: Tensor | None
    col_tile: Pair
    col_tensor_amax: Tensor | None
    col_data: Tensor | None
    col_scale: Tensor | None
    col_hadamard: int | None


PARTS = ("tile", "tensor_amax", "data", "scale")
KEYS = tuple(f"{side}_{part}" for side in ("row", "col") for part in PARTS)  # in the order of the schema


@taped
@takes(GroupedNvFp4Planes)
def grouped_quantize_nvfp4(
    x: Tensor | Source,
    *,
    table: Tensor,
    e4m3_max: int,
    four_over_six: str,
    rng_state: Tensor | None,
    noop: Tensor | None = None,
    **planes: Unpack[GroupedNvFp4Planes],
) -> None:
    """Quantizes every group of rows as `quantize_nvfp4` does it alone; both directions in one pass over `x`.

    What is columnwise begins, for each group, at a tile of 128 rows of its own, in the order of groups and without a
    gap between tiles; behind a group's last row, up to the end of its tile, it is that of zeros. What belongs to rows
    behind the last group, and to tiles behind the last, is left as it is.

    Args:
        x: (T, K), fp32, bf16 or fp16; or a source. Of `Summed`, f32 (at least P / 128, K), panels are these tiles.
        table: int32 (4, G + 1), see `group_table`.
        e4m3_max: largest scale byte, 448 or 256.
        four_over_six: "none", or the error by which the largest value of a tile becomes 6 or 4: "mae", "mse".
        rng_state: int64 (2,), seed and offset of the stream for stochastic rounding, or (2, 2), those of the row and of
            the column direction; None rounds to nearest even. An element takes the byte of its place in `x`, whatever
            its group; K is a multiple of 16 then.
        noop: int32 or fp32, one element on the device of `x`: nothing is written where any of its bits is set.
        planes: see `GroupedNvFp4Planes`; a square's byte is repeated.

    Raises:
        ValueError: a type or shape that does not fit.
    """
    tiles, (rows, cols) = check_groups(x, table), x.shape
    check_choice("e4m3_max", e4m3_max, E4M3_MAX)
    check_choice("four_over_six", four_over_six, FOUR_OVER_SIX)
    check_noop(noop, x)
    _check_rounding(rng_state, cols)
    hadamard = planes.get("col_hadamard")
    if hadamard is not None and four_over_six != "none":
        raise ValueError(f"four_over_six: got {four_over_six!r} beside col_hadamard; use 'none'")
    row_data, col_data = planes.get("row_data"), planes.get("col_data")
    if row_data is not None:
        if cols % 2:
            raise ValueError(f"row_data: got {cols} columns, wanted an even number, as two share a byte; pad x")
        check_output("row_data", row_data, torch.uint8, (rows, cols // 2))
        _check_scales("row", planes, (rows, -(-cols // TILE)), table)
    if col_data is not None:
        check_padded("col_data", col_data, cols, tiles=tiles, per_tile=GROUP_TILE // 2)
        _check_scales("col", planes, (cols, tiles * PER_GROUP_TILE), table)
    outputs = (planes.get(key, (1, 1) if "tile" in key else None) for key in KEYS)
    rule = (table, e4m3_max, four_over_six, hadamard)
    torch.ops.te_dist.grouped_quantize_nvfp4(*flat_source(x), *rule, *outputs, rng_state, noop)


def _check_rounding(rng_state: Tensor | None, cols: int) -> None:
    if rng_state is None:
        return
    check_packed("rng_state", rng_state, (torch.int64,), (2, 2) if rng_state.dim() == 2 else (2,))
    if cols % TILE:
        raise ValueError(f"rng_state: got {cols} columns, wanted a multiple of {TILE} to round stochastically; pad x")


def _check_scales(side: str, planes: GroupedNvFp4Planes, grid: Pair, table: Tensor) -> None:
    tile, amax, scale = (planes.get(f"{side}_{part}") for part in ("tile", "tensor_amax", "scale"))
    if scale is None or amax is None:
        name = "scale" if scale is None else "tensor_amax"
        raise ValueError(f"{side}_{name}: got None beside {side}_data; a direction is written with its scales")
    check_choice(f"{side}_tile", tuple(tile or ()), (RUNS[side], SQUARE))
    check_rows(f"{side}_scale", scale, (torch.uint8,), grid, at_least=True)
    check_per_group(f"{side}_tensor_amax", amax, table)


def _cpu(
    x: Tensor, source: str, beside: list[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    table, e4m3_max, four_over_six, hadamard, *planes, rng_state, noop = rest
    if is_set(noop):
        return
    row_tile, row_amax, row_data, row_scale, col_tile, col_amax, col_data, col_scale = planes
    matrix, rule = (
        matrix_of(x, source, beside),
        dict[str, Any](phase=(0, 0), e4m3_max=e4m3_max, four_over_six=four_over_six),
    )
    cols, across = matrix.shape[1], -(-matrix.shape[1] // TILE)
    states = rng_state if rng_state is not None and rng_state.dim() == 2 else (rng_state, rng_state)
    for number, group in groups_of(table, len(matrix)):
        blocks = torch.tensor([0, group.rows.start * cols // TILE])  # of random bytes before the group
        row_state, col_state = (None if state is None else state + blocks for state in states)
        if row_data is not None:
            amax = row_amax[place_of(number, row_amax), None]
            outputs = dict(row_data=row_data[group.rows], row_scale=row_scale[group.rows, :across])
            how = dict(rng_state=row_state, row_tile=row_tile, row_tensor_amax=amax)
            quantize_nvfp4(matrix[group.rows], **rule, **how, **outputs)
        if col_data is not None:
            amax, padded = col_amax[place_of(number, col_amax), None], with_padding(matrix, group)
            codes = col_data.new_empty(cols, padded.shape[0] // 2)
            outputs = dict(col_data=codes, col_scale=col_scale[:cols, group.padded(PER_GROUP_TILE)].t())
            how = dict(rng_state=col_state, col_tile=col_tile, col_tensor_amax=amax, col_hadamard=hadamard)
            quantize_nvfp4(padded, **rule, **how, **outputs)
            col_data[:, group.padded(GROUP_TILE // 2)] = codes
    sum_groups(matrix, table, sums)
    sum_rows((x, source, beside), table, row_sums)


register(
    "grouped_quantize_nvfp4(Tensor x, str source, Tensor[] beside, Tensor(s!)? panel_sums, "
    "Tensor(t!)? row_sums, Tensor table, int e4m3_max, str four_over_six, int? hadamard, "
    "int[] row_tile, Tensor? row_tensor_amax, Tensor(a!)? row_data, Tensor(b!)? row_scale, "
    "int[] col_tile, Tensor? col_tensor_amax, Tensor(c!)? col_data, Tensor(d!)? col_scale, "
    "Tensor? rng_state, Tensor? noop) -> ()",
    _cpu,
    kernels.grouped_quantize_nvfp4,
)
