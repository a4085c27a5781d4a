"""FP8 with one scale for the whole tensor, known beforehand."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.ops._checks import FP8, check_choice, check_dtype, check_shape, takes
from te_dist.ops._library import register
from te_dist.ops._noop import check_noop, is_set
from te_dist.ops._planes import TENSOR_OUTPUTS, TensorPlanes, check_scalar, check_tensor_planes
from te_dist.ops.panel_sums import find_sums
from te_dist.ops.source import Source, check_source, flat_source


@takes(TensorPlanes)
def quantize_float8_tensor(
    x: Tensor | Source,
    scale: Tensor,
    *,
    fp8: str,
    amax: Tensor | None = None,
    noop: Tensor | None = None,
    **planes: Unpack[TensorPlanes],
) -> None:
    """Multiplies by `scale` and casts, saturating, to nearest even; both directions in one pass over `x`.

    Args:
        x: (rows, cols), fp32, bf16 or fp16; or a source.
        scale: f32, (1,), the multiplier.
        fp8: "e4m3" or "e5m2".
        amax: f32, one element, not negative: raised to the largest magnitude of `x`, NaN ignored.
        noop: int32 or fp32, one element on the device of `x`: nothing is written where any of its bits is set.
        planes: row_data (rows, cols), col_data (cols, rows), and the inverse of the scale for each.
    """
    check_source(x)
    check_choice("fp8", fp8, FP8)
    check_dtype("scale", scale, (torch.float32,))
    check_shape("scale", scale, (1,))
    check_scalar("amax", amax)
    check_noop(noop, x)
    check_tensor_planes(planes, x)
    outputs = map(planes.get, TENSOR_OUTPUTS)
    torch.ops.te_dist.quantize_float8_tensor(*flat_source(x), scale, fp8, amax, *outputs, noop)


def cast(read: tuple[Tensor, str, list[Tensor]], scale: Tensor, fp8: str, *outputs: Tensor | None) -> None:
    """The op on the CPU, without amax and noop."""
    row_data, row_scale, col_data, col_scale = outputs
    _C.quantize_float8_tensor(read, scale, fp8, row_data, col_data, torch.get_num_threads())
    for inverse in (row_scale, col_scale):
        if inverse is not None:
            inverse.copy_(scale.reciprocal().view_as(inverse))


def _cpu(
    x: Tensor, source: str, beside: list[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    scale, fp8, amax, *outputs, noop = rest
    if is_set(noop):
        return
    read = (x, source, beside)
    cast(read, scale, fp8, *outputs)
    find_sums(read, sums, row_sums)
    if amax is not None:
        found = torch.empty_like(amax)
        _C.tile_amax(read, (0, 0), (0, 0), found, torch.get_num_threads())
        torch.maximum(amax, found, out=amax)


register(
    "quantize_float8_tensor(Tensor x, str source, Tensor[] beside, Tensor(s!)? panel_sums, Tensor(t!)? row_sums, "
    "Tensor scale, str fp8, Tensor(a!)? amax, Tensor(b!)? row_data, Tensor(c!)? row_scale, "
    "Tensor(d!)? col_data, Tensor(e!)? col_scale, Tensor? noop) -> ()",
    _cpu,
    kernels.quantize_float8_tensor,
)
