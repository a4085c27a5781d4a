"""Values of NVFP4 codes."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.formats.region import Pair
from te_dist.ops._checks import check_choice, check_matrix, check_output, check_plane, grid_shape, takes
from te_dist.ops._library import register
from te_dist.ops.quantize_nvfp4 import E4M3_MAX, TILE


class NvFp4Layout(TypedDict):
    """packed_dim: 1 where two columns share a byte, 0 where two rows do.

    phase: offset of the first element inside its tile.  e4m3_max: largest scale byte, 448 or 256.
    """

    packed_dim: int
    phase: Pair
    e4m3_max: int


@takes(NvFp4Layout)
def dequantize_nvfp4(data: Tensor, scale: Tensor, amax: Tensor, *, out: Tensor, **layout: Unpack[NvFp4Layout]) -> None:
    """Writes e2m1 * (e4m3 * amax / (6 * e4m3_max)), fp32 products rounded once to the type of `out`.

    Args:
        data: u8, (rows, cols / 2), or (cols, rows / 2) where packed along rows.
        scale: u8 (e4m3), logical view on the grid of (1, 16) tiles, or (16, 1) where packed along rows.
        amax: f32, (1, 1) or (rows, 1).
        out: (rows, cols), fp32, bf16 or fp16.
        layout: see `NvFp4Layout`.
    """
    packed_dim, phase, e4m3_max = layout["packed_dim"], layout["phase"], layout["e4m3_max"]
    check_matrix("out", out)
    check_choice("packed_dim", packed_dim, (0, 1))
    check_choice("e4m3_max", e4m3_max, E4M3_MAX)
    rows, cols = out.shape
    by_cols = packed_dim == 1
    if (cols if by_cols else rows) % 2:
        raise ValueError(f"out: got shape {(rows, cols)}, wanted dimension {packed_dim} even: two values share a byte")
    check_output("data", data, torch.uint8, (rows, cols // 2) if by_cols else (cols, rows // 2))
    grain = (1, TILE) if by_cols else (TILE, 1)
    check_plane("scale", scale, torch.uint8, grid_shape(out.shape, phase, grain))
    check_plane("amax", amax, torch.float32, (rows, 1) if tuple(amax.shape) == (rows, 1) else (1, 1))
    torch.ops.te_dist.dequantize_nvfp4(data, scale, amax, packed_dim, phase, e4m3_max, out)


def _cpu(data: Tensor, scale: Tensor, amax: Tensor, packed_dim: int, *rest: Any) -> None:
    phase, e4m3_max, out = rest
    grain = (1, TILE) if packed_dim == 1 else (TILE, 1)
    _C.dequantize_nvfp4(data, scale, amax, (packed_dim, e4m3_max), grain, phase, out, torch.get_num_threads())


register(
    "dequantize_nvfp4(Tensor data, Tensor scale, Tensor amax, int packed_dim, int[] phase, int e4m3_max, "
    "Tensor(a!) out) -> ()",
    _cpu,
    kernels.dequantize_nvfp4,
)
