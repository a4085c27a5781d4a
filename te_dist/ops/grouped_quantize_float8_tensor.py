"""FP8 with one scale for all groups of rows, or one for each, known beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.ops._checks import FP8, check_choice, check_output, check_packed, takes
from te_dist.ops._groups import (
    Group,
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
from te_dist.ops._planes import TENSOR_OUTPUTS
from te_dist.ops._taped import taped
from te_dist.ops.group_table import TILE
from te_dist.ops.quantize_float8_tensor import cast
from te_dist.ops.source import Source, flat_source


class GroupedTensorPlanes(TypedDict, total=False):
    """Keywords of the two directions. A direction without data is not written. P: see `padded_rows`.

    row_data: u8 codes (T, K).  col_data: u8 codes (K, at least P).
    *_scale: f32, of as many elements as there are scales: their inverses, by which codes are multiplied.
    """

    row_data: Tensor | None
    row_scale: Tensor | None
    col_data: Tensor | None
    col_scale: Tensor | None


@taped
@takes(GroupedTensorPlanes)
def grouped_quantize_float8_tensor(
    x: Tensor | Source,
    scale: Tensor,
    *,
    table: Tensor,
    fp8: str,
    amax: Tensor | None = None,
    noop: Tensor | None = None,
    **planes: Unpack[GroupedTensorPlanes],
) -> None:
    """Multiplies groups of rows by `scale` and casts, as `quantize_float8_tensor`; both directions in one pass.

    Codes by columns lie, and what belongs to no group is left, as `grouped_quantize_float8_block` has it.

    Args:
        x: (T, K), fp32, bf16 or fp16; or a source. Of `Summed`, f32 (at least P / 128, K), panels are tiles of groups.
        scale: f32, the multiplier: (1,), or (G,), that of each group.
        table: int32 (4, G + 1), see `group_table`.
        fp8: "e4m3" or "e5m2".
        amax: f32, as `scale`, not negative: raised to the largest magnitude of what each scales, NaN ignored.
        noop: int32 or fp32, one element on the device of `x`: nothing is written where any of its bits is set.
        planes: see `GroupedTensorPlanes`.

    Raises:
        ValueError: a type or shape that does not fit.
    """
    check_per_group("scale", scale, table)
    check_casts(x, scale, table, planes)
    check_choice("fp8", fp8, FP8)
    check_noop(noop, x)
    if amax is not None:
        check_packed("amax", amax, (torch.float32,), scale.shape)
    outputs = map(planes.get, TENSOR_OUTPUTS)
    torch.ops.te_dist.grouped_quantize_float8_tensor(*flat_source(x), scale, table, fp8, amax, *outputs, noop)


def check_casts(x: Tensor | Source, scale: Tensor, table: Tensor, planes: GroupedTensorPlanes) -> None:
    """Raises ValueError where matrix, table and outputs do not fit each other. `scale`: as many as there are."""
    tiles, (rows, cols) = check_groups(x, table), x.shape
    row_data, row_scale, col_data, col_scale = map(planes.get, TENSOR_OUTPUTS)
    if row_data is None and col_data is None:
        raise ValueError("row_data: got None, as for col_data; pass at least one of the two")
    if row_data is not None:
        check_output("row_data", row_data, torch.uint8, (rows, cols))
    if col_data is not None:
        check_padded("col_data", col_data, cols, tiles=tiles, per_tile=TILE)
    for name, inverse in (("row_scale", row_scale), ("col_scale", col_scale)):
        if inverse is not None:
            check_packed(name, inverse, (torch.float32,), scale.shape)


def cast_groups(
    matrix: Tensor, table: Tensor, scale: Tensor, fp8: str, *outputs: Tensor | None
) -> Iterator[tuple[slice, Group]]:
    """The op on the CPU, without amax, noop and sums; yields of every group, once it is done, which scale is its."""
    row_data, row_scale, col_data, col_scale = outputs
    for inverse in (row_scale, col_scale):
        if inverse is not None:
            inverse.copy_(scale.reciprocal())
    for number, group in groups_of(table, len(matrix)):
        its = place_of(number, scale)
        if row_data is not None:
            cast((matrix[group.rows], "plain", []), scale[its], fp8, row_data[group.rows], None, None, None)
        if col_data is not None:
            padded = with_padding(matrix, group)
            codes = col_data.new_empty(matrix.shape[1], padded.shape[0])
            cast((padded, "plain", []), scale[its], fp8, None, None, codes, None)
            col_data[:, group.padded()] = codes
        yield its, group


def _cpu(
    x: Tensor, source: str, beside: list[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    scale, table, fp8, amax, *outputs, noop = rest
    if is_set(noop):
        return
    matrix, found = matrix_of(x, source, beside), torch.empty(1)
    for its, group in cast_groups(matrix, table, scale, fp8, *outputs):
        if amax is not None:
            _C.tile_amax((matrix[group.rows], "plain", []), (0, 0), (0, 0), found, torch.get_num_threads())
            amax[its] = torch.maximum(amax[its], found)
    sum_groups(matrix, table, sums)
    sum_rows((x, source, beside), table, row_sums)


register(
    "grouped_quantize_float8_tensor(Tensor x, str source, Tensor[] beside, "
    "Tensor(s!)? panel_sums, Tensor(t!)? row_sums, "
    "Tensor scale, Tensor table, str fp8, Tensor(a!)? amax, Tensor(b!)? row_data, Tensor(c!)? row_scale, "
    "Tensor(d!)? col_data, Tensor(e!)? col_scale, Tensor? noop) -> ()",
    _cpu,
    kernels.grouped_quantize_float8_tensor,
)
