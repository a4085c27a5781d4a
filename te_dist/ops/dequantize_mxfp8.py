"""Values of MXFP8 codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.formats.region import Pair
from te_dist.ops._checks import FP8, check_choice, check_matrix, check_plane, grid_shape
from te_dist.ops._library import register


def dequantize_mxfp8(data: Tensor, scale: Tensor, *, grain: Pair, phase: Pair, fp8: str, out: Tensor) -> None:
    """Writes code * 2^(scale - 127), one fp32 product rounded once to the type of `out`.

    Args:
        data: u8, logical (rows, cols) view.
        scale: u8 exponents, logical view on the grid of `grain`.
        grain: (1, 32) or (32, 1), what one exponent covers.
        phase: offset of the first element inside its grain.
        fp8: "e4m3" or "e5m2".
        out: (rows, cols), fp32, bf16 or fp16.
    """
    check_matrix("out", out)
    check_choice("fp8", fp8, FP8)
    check_plane("data", data, torch.uint8, out.shape)
    check_plane("scale", scale, torch.uint8, grid_shape(out.shape, phase, grain))
    torch.ops.te_dist.dequantize_mxfp8(data, scale, grain, phase, fp8, out)


def _cpu(*args: Any) -> None:
    _C.dequantize_mxfp8(*args, torch.get_num_threads())


register(
    "dequantize_mxfp8(Tensor data, Tensor scale, int[] grain, int[] phase, str fp8, Tensor(a!) out) -> ()",
    _cpu,
    kernels.dequantize_mxfp8,
)
