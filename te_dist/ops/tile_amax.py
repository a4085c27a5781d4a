"""Largest magnitude of every tile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.formats.region import Pair
from te_dist.ops._checks import check_output, grid_shape
from te_dist.ops._library import register
from te_dist.ops.source import Source, check_source, flat_source


def tile_amax(x: Tensor | Source, *, phase: Pair, tile: Pair, out: Tensor) -> None:
    """Writes the largest magnitude of each tile of `x`; NaN is ignored, a tile without values has 0.

    Args:
        x: (rows, cols), fp32, bf16 or fp16; or a source.
        phase: offset of its first element inside the first tile.
        tile: (rows, cols) of a tile; WHOLE for an entire dimension.
        out: f32, (tiles along rows, tiles along cols).
    """
    check_source(x)
    check_output("out", out, torch.float32, grid_shape(x.shape, phase, tile))
    torch.ops.te_dist.tile_amax(*flat_source(x)[:3], phase, tile, out)


def _cpu(x: Tensor, source: str, beside: list[Tensor], *rest: Any) -> None:
    _C.tile_amax((x, source, beside), *rest, torch.get_num_threads())


register(
    "tile_amax(Tensor x, str source, Tensor[] beside, int[] phase, int[] tile, Tensor(a!) out) -> ()",
    _cpu,
    kernels.tile_amax,
)
