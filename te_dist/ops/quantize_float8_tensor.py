"""FP8 with one scale for the whole tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.ops._checks import FP8, check_choice, check_dtype, check_matrix, check_output, check_shape
from te_dist.ops._library import register


def quantize_float8_tensor(
    x: Tensor, scale: Tensor, *, fp8: str, row_data: Tensor | None = None, col_data: Tensor | None = None
) -> None:
    """Multiplies by `scale` and casts, saturating, to nearest even.

    Args:
        x: (rows, cols), fp32, bf16 or fp16.
        scale: f32, (1,), the multiplier.
        fp8: "e4m3" or "e5m2".
        row_data: u8, (rows, cols).
        col_data: u8, (cols, rows), the transpose.
    """
    check_matrix("x", x)
    check_choice("fp8", fp8, FP8)
    check_dtype("scale", scale, (torch.float32,))
    check_shape("scale", scale, (1,))
    rows, cols = x.shape
    if row_data is not None:
        check_output("row_data", row_data, torch.uint8, (rows, cols))
    if col_data is not None:
        check_output("col_data", col_data, torch.uint8, (cols, rows))
    torch.ops.te_dist.quantize_float8_tensor(x, scale, fp8, row_data, col_data)


def _cpu(x: Tensor, scale: Tensor, fp8: str, row_data: Tensor | None, col_data: Tensor | None) -> None:
    _C.quantize_float8_tensor(x, scale, fp8, row_data, col_data, torch.get_num_threads())


register(
    "quantize_float8_tensor(Tensor x, Tensor scale, str fp8, Tensor(a!)? row_data, Tensor(b!)? col_data) -> ()",
    _cpu,
    kernels.quantize_float8_tensor,
)
