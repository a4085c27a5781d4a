"""FP8 with one fp32 scale for a run of values or a square of them."""

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

TILE = 128


@takes(Planes)
def quantize_float8_block(
    x: Tensor | Source,
    *,
    phase: Pair,
    fp8: str,
    pow2: bool,
    eps: float,
    noop: Tensor | None = None,
    **planes: Unpack[Planes],
) -> None:
    """Finds the scale of every tile, stores its inverse and casts; both directions in one pass over `x`.

    Args:
        x: (rows, cols), fp32, bf16 or fp16; or a source.
        phase: offset of its first element inside the first 128 x 128 tile.
        fp8: "e4m3" or "e5m2".
        pow2: round scales down to a power of two.
        eps: lower bound of a tile's amax.
        noop: int32 or fp32, one element on the device of `x`: nothing is written where any of its bits is set.
        planes: tiles (1, 128), (128, 1) or (128, 128); row_data (rows, cols), col_data (cols, rows); scales are
            f32 views on the tile grid.
    """
    check_source(x, phase)
    check_choice("fp8", fp8, FP8)
    check_noop(noop, x)
    rows, cols = x.shape
    check_direction(planes, Wanted("row", TILE, (rows, cols), torch.float32, True), x, phase)
    check_direction(planes, Wanted("col", TILE, (cols, rows), torch.float32, True), x, phase)
    row, col = flat(planes, "row"), flat(planes, "col")
    torch.ops.te_dist.quantize_float8_block(*flat_source(x), phase, fp8, pow2, eps, *row, *col, noop)


def _cpu(
    x: Tensor, source: str, beside: list[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    phase, fp8, pow2, eps, *planes, noop = rest
    if is_set(noop):
        return
    read = (x, source, beside)
    _C.quantize_float8_block(read, phase, fp8, (pow2, eps), planes[:4], planes[4:], torch.get_num_threads())
    find_sums(read, sums, row_sums)


register(
    "quantize_float8_block(Tensor x, str source, Tensor[] beside, Tensor(s!)? panel_sums, Tensor(t!)? row_sums, "
    "int[] phase, str fp8, bool pow2, float eps, "
    "int[] row_tile, Tensor? row_amax, Tensor(a!)? row_data, Tensor(b!)? row_scale, "
    "int[] col_tile, Tensor? col_amax, Tensor(c!)? col_data, Tensor(d!)? col_scale, Tensor? noop) -> ()",
    _cpu,
    kernels.quantize_float8_block,
)
