"""Launches of the dequantizers. Arguments are those of the ops, in the order of their schemas."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from te_dist.formats.region import Pair
from te_dist.kernels.arguments import (
    CODES,
    ELEMENTS,
    EXTENTS,
    PANEL,
    PHASE,
    access_bytes,
    blocks_for,
    extents_of,
    phase_in,
    plane,
    plane_layout,
)
from te_dist.kernels.quantize import NVFP4_TILE
from te_dist.kernels.runtime import launch
from te_dist.kernels.spec import Layout, Spec, once

_COMMON = f"out:P {EXTENTS} {plane_layout('data')} {plane_layout('scale')} tile.rows:q tile.cols:q {PHASE}"
# An empty `extra` takes one byte of the struct, which padding to its alignment makes eight.
_LAYOUTS = {
    "FloatScales": Layout(f"{_COMMON} extra:q"),
    "PowerScales": Layout(f"{_COMMON} extra:q"),
    "NvFp4Scales": Layout(f"{_COMMON} {plane_layout('extra.amax')} extra.e4m3_max:q"),
}


@once
def decoder(element: str, code: str, scales: str, order: str, widths: tuple[int, int]) -> Spec:
    """Spec of a dequantizer. `widths`: bytes read and written at a time."""
    constants = ", ".join((element, code, scales, f"Order::{order}", *map(str, widths)))
    return Spec("dequantize.cuh", f"Dequantize<{constants}>", _LAYOUTS[scales])


def _store_bytes(out: Tensor) -> int:
    return access_bytes(16, out.data_ptr(), out.shape[1] * out.element_size())


def _order_and_load(data: Tensor) -> tuple[str, int]:
    """How the codes of a logical view lie, and the bytes that can be read at a time."""
    rows, cols = data.shape
    if data.stride(1) == 1 or cols == 1:
        return "kRows", access_bytes(8, data.data_ptr(), data.stride(0), cols)
    if data.stride(0) == 1 or rows == 1:
        return "kColumns", access_bytes(8, data.data_ptr(), data.stride(1), rows)
    return "kAny", 1


def _decode(kind: tuple[str, str], data: Tensor, scale: Tensor, tiles: tuple[Pair, Pair], out: Tensor) -> None:
    if out.numel() == 0:
        return
    code, scales = kind
    tile, phase = tiles
    order, load = _order_and_load(data)
    spec = decoder(ELEMENTS[out.dtype], code, scales, order, (load, _store_bytes(out)))
    place = (*extents_of(tile, out.shape), *phase_in(tile, phase))
    values = (out.data_ptr(), *out.shape, data.data_ptr(), *data.stride(), *plane(scale), *place, 0)
    launch(spec, out, (blocks_for(out.shape, PANEL), 1), values)


def dequantize_float8(data: Tensor, scale: Tensor, tile: Pair, phase: Pair, fp8: str, out: Tensor) -> None:
    """See te_dist.ops.dequantize_float8."""
    _decode((CODES[fp8], "FloatScales"), data, scale, (tile, phase), out)


def dequantize_mxfp8(data: Tensor, scale: Tensor, grain: Pair, phase: Pair, fp8: str, out: Tensor) -> None:
    """See te_dist.ops.dequantize_mxfp8."""
    _decode((CODES[fp8], "PowerScales"), data, scale, (grain, phase), out)


def dequantize_nvfp4(data: Tensor, scale: Tensor, amax: Tensor, packed_dim: int, *rest: Any) -> None:
    """See te_dist.ops.dequantize_nvfp4."""
    phase, e4m3_max, out = rest
    if out.numel() == 0:
        return
    by_rows = packed_dim == 1
    pitch = data.shape[1]
    widths = (access_bytes(4, data.data_ptr(), pitch), _store_bytes(out))
    order = "kPairsInRows" if by_rows else "kPairsInColumns"
    spec = decoder(ELEMENTS[out.dtype], "E2M1", "NvFp4Scales", order, widths)
    grain = (1, NVFP4_TILE[1]) if by_rows else (NVFP4_TILE[0], 1)
    codes = (data.data_ptr(), pitch if by_rows else 0, 0 if by_rows else pitch)
    values = (out.data_ptr(), *out.shape, *codes, *plane(scale), *grain, *phase_in(grain, phase))
    launch(spec, out, (blocks_for(out.shape, PANEL), 1), (*values, *plane(amax), e4m3_max))
