"""MXFP8: FP8 with a power-of-two scale byte for a run of values or a square of them."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.formats.region import Pair
from te_dist.ops._checks import FP8, check_choice, takes
from te_dist.ops._library import register
from te_dist.ops._noop import check_noop, is_set
from te_dist.ops._planes import Planes, Wanted, check_direction, flat
from te_dist.ops.panel_sums import find_sums
from te_dist.ops.source import Source, check_source, flat_source

TILE = 32


@takes(Planes)
def quantize_mxfp8(
    x: Tensor | Source, *, phase: Pair, fp8: str, noop: Tensor | None = None, **planes: Unpack[Planes]
) -> None:
    """Finds the exponent of every tile, stores it and casts; both directions in one pass over `x`.

    Args:
        x: (rows, cols), fp32, bf16 or fp16; or a source.
        phase: offset of its first element inside the first 32 x 32 tile.
        fp8: "e4m3" or "e5m2".
        noop: int32 or fp32, one element on the device of `x`: nothing is written where any of its bits is set.
        planes: tiles (1, 32), (32, 1) or (32, 32); data (rows, cols) in both directions; row_scale u8 (rows, tiles
            along cols), col_scale u8 (tiles along rows, cols): a square's exponent is repeated.
    """
    check_source(x, phase)
    check_choice("fp8", fp8, FP8)
    check_noop(noop, x)
    rows, cols = x.shape
    check_direction(planes, Wanted("row", TILE, (rows, cols), torch.uint8, False), x, phase)
    check_direction(planes, Wanted("col", TILE, (rows, cols), torch.uint8, False), x, phase)
    torch.ops.te_dist.quantize_mxfp8(*flat_source(x), phase, fp8, *flat(planes, "row"), *flat(planes, "col"), noop)


def _cpu(
    x: Tensor, source: str, beside: list[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    phase, fp8, *planes, noop = rest
    if is_set(noop):
        return
    read = (x, source, beside)
    _C.quantize_mxfp8(read, phase, fp8, planes[:4], planes[4:], torch.get_num_threads())
    find_sums(read, sums, row_sums)


register(
    "quantize_mxfp8(Tensor x, str source, Tensor[] beside, Tensor(s!)? panel_sums, Tensor(t!)? row_sums, "
    "int[] phase, str fp8, "
    "int[] row_tile, Tensor? row_amax, Tensor(a!)? row_data, Tensor(b!)? row_scale, "
    "int[] col_tile, Tensor? col_amax, Tensor(c!)? col_data, Tensor(d!)? col_scale, Tensor? noop) -> ()",
    _cpu,
    kernels.quantize_mxfp8,
)
