"""Values of FP8 codes with fp32 scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.formats.region import Pair
from te_dist.ops._checks import FP8, check_choice, check_matrix, check_plane, grid_shape
from te_dist.ops._library import register


def dequantize_float8(data: Tensor, scale: Tensor, *, tile: Pair, phase: Pair, fp8: str, out: Tensor) -> None:
    """Writes code * scale, one fp32 product rounded once to the type of `out`.

    Args:
        data: u8, logical (rows, cols) view.
        scale: f32, logical view on the tile grid (the inverse of what values were multiplied by).
        tile: (rows, cols) that share a scale; WHOLE for an entire dimension.
        phase: offset of the first element inside its tile.
        fp8: "e4m3" or "e5m2".
        out: (rows, cols), fp32, bf16 or fp16.
    """
    check_matrix("out", out)
    check_choice("fp8", fp8, FP8)
    check_plane("data", data, torch.uint8, out.shape)
    check_plane("scale", scale, torch.float32, grid_shape(out.shape, phase, tile))
    torch.ops.te_dist.dequantize_float8(data, scale, tile, phase, fp8, out)


def _cpu(*args: Any) -> None:
    _C.dequantize_float8(*args, torch.get_num_threads())


register(
    "dequantize_float8(Tensor data, Tensor scale, int[] tile, int[] phase, str fp8, Tensor(a!) out) -> ()",
    _cpu,
    kernels.dequantize_float8,
)
