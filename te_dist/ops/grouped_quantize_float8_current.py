"""FP8 with one scale for all groups of rows, or one for each, which follows from an amax on the device."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.ops._checks import FP8, check_choice, takes
from te_dist.ops._groups import check_per_group, matrix_of, sum_groups, sum_rows
from te_dist.ops._library import register
from te_dist.ops._noop import check_noop, is_set
from te_dist.ops._planes import TENSOR_OUTPUTS
from te_dist.ops._taped import taped
from te_dist.ops.grouped_quantize_float8_tensor import GroupedTensorPlanes, cast_groups, check_casts
from te_dist.ops.quantize_float8_current import scale_of
from te_dist.ops.source import Source, flat_source


@taped
@takes(GroupedTensorPlanes)
def grouped_quantize_float8_current(  # noqa: PLR0913  (an op's signature is its schema)
    x: Tensor | Source,
    amax: Tensor,
    *,
    table: Tensor,
    fp8: str,
    pow2: bool,
    eps: float,
    noop: Tensor | None = None,
    **planes: Unpack[GroupedTensorPlanes],
) -> None:
    """Finds the scale of every amax as `quantize_float8_current`, stores its inverse and casts in both directions.

    `grouped_amax` finds the amaxes. Codes by columns lie, and what belongs to no group is left, as
    `grouped_quantize_float8_block` has it; empty groups have scales all the same.

    Args:
        x: (T, K), fp32, bf16 or fp16; or a source. Of `Summed`, f32 (at least P / 128, K), panels are tiles of groups.
        amax: f32, (1,), or (G,), that of each group.
        table: int32 (4, G + 1), see `group_table`.
        fp8: "e4m3" or "e5m2".
        pow2: round scales down to a power of two.
        eps: lower bound of an amax.
        noop: int32 or fp32, one element on the device of `x`: nothing is written where any of its bits is set.
        planes: see `GroupedTensorPlanes`.

    Raises:
        ValueError: a type or shape that does not fit.
    """
    check_per_group("amax", amax, table)
    check_casts(x, amax, table, planes)
    check_choice("fp8", fp8, FP8)
    check_noop(noop, x)
    outputs = map(planes.get, TENSOR_OUTPUTS)
    torch.ops.te_dist.grouped_quantize_float8_current(*flat_source(x), amax, table, fp8, pow2, eps, *outputs, noop)


def _cpu(
    x: Tensor, source: str, beside: list[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    amax, table, fp8, pow2, eps, *outputs, noop = rest
    if is_set(noop):
        return
    matrix = matrix_of(x, source, beside)
    for _ in cast_groups(matrix, table, scale_of(amax, fp8, pow2, eps), fp8, *outputs):
        pass
    sum_groups(matrix, table, sums)
    sum_rows((x, source, beside), table, row_sums)


register(
    "grouped_quantize_float8_current(Tensor x, str source, Tensor[] beside, "
    "Tensor(s!)? panel_sums, Tensor(t!)? row_sums, "
    "Tensor amax, Tensor table, str fp8, bool pow2, float eps, Tensor(a!)? row_data, Tensor(b!)? row_scale, "
    "Tensor(c!)? col_data, Tensor(d!)? col_scale, Tensor? noop) -> ()",
    _cpu,
    kernels.grouped_quantize_float8_current,
)
