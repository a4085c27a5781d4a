"""FP8 with one fp32 scale for a run of values or a square of them."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.formats.region import Pair
from te_dist.ops._checks import FP8, check_choice, check_matrix
from te_dist.ops._library import register
from te_dist.ops._noop import check_noop, is_set
from te_dist.ops._planes import Planes, Wanted, check_direction, flat

TILE = 128


def quantize_float8_block(
    x: Tensor,
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
        x: (rows, cols), fp32, bf16 or fp16.
        phase: offset of its first element inside the first 128 x 128 tile.
        fp8: "e4m3" or "e5m2".
        pow2: round scales down to a power of two.
        eps: lower bound of a tile's amax.
        noop: int32 or fp32, one element on the device of `x`: nothing is written where any of its bits is set.
        planes: tiles (1, 128), (128, 1) or (128, 128); row_data (rows, cols), col_data (cols, rows); scales are
            f32 views on the tile grid.
    """
    check_matrix("x", x)
    check_choice("fp8", fp8, FP8)
    check_noop(noop, x)
    rows, cols = x.shape
    check_direction(planes, Wanted("row", TILE, (rows, cols), torch.float32, True), x, phase)
    check_direction(planes, Wanted("col", TILE, (cols, rows), torch.float32, True), x, phase)
    row, col = flat(planes, "row"), flat(planes, "col")
    torch.ops.te_dist.quantize_float8_block(x, phase, fp8, pow2, eps, *row, *col, noop)


def _cpu(x: Tensor, phase: list[int], fp8: str, pow2: bool, eps: float, *rest: object) -> None:
    *planes, noop = rest
    if not is_set(noop):
        _C.quantize_float8_block(x, phase, fp8, (pow2, eps), planes[:4], planes[4:], torch.get_num_threads())


register(
    "quantize_float8_block(Tensor x, int[] phase, str fp8, bool pow2, float eps, "
    "int[] row_tile, Tensor? row_amax, Tensor(a!)? row_data, Tensor(b!)? row_scale, "
    "int[] col_tile, Tensor? col_amax, Tensor(c!)? col_data, Tensor(d!)? col_scale, Tensor? noop) -> ()",
    _cpu,
    kernels.quantize_float8_block,
)
