"""Launches of the quantizers. Arguments are those of the ops, in the order of their schemas."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from te_dist.formats.region import Pair
from te_dist.kernels.arguments import (
    CODES,
    ELEMENTS,
    EXTENTS,
    PHASE,
    access_bytes,
    blocks_for,
    phase_in,
    plane,
    plane_layout,
    pointer,
)
from te_dist.kernels.inputs import Source, layout, plain
from te_dist.kernels.runtime import launch
from te_dist.kernels.spec import Spec

PANEL = (128, 128)  # elements that a block of threads quantizes
BLOCK_TILE, MX_TILE, NVFP4_TILE = (128, 128), (32, 32), (16, 16)

_ABSENT, _RUN, _SQUARE, _TENSOR = (f"Share::k{name}" for name in ("Absent", "Run", "Square", "Tensor"))


def _output_layout(name: str) -> str:
    return f"{plane_layout(f'{name}.amax')} {name}.data:P {plane_layout(f'{name}.scale')}"


def _output(amax: Tensor | None, data: Tensor | None, scale: Tensor | None) -> tuple[int, ...]:
    """Values of a `BlockOutput`."""
    return (*plane(amax), pointer(data), *plane(scale))


_OUTPUTS = f"{_output_layout('row')} {_output_layout('col')}"
_FLOAT8 = f"{EXTENTS} {PHASE} tensor_scale:P eps:f pow2:i {_OUTPUTS}"
_MXFP8 = f"{EXTENTS} {PHASE} {_OUTPUTS}"
_NVFP4 = (
    f"{EXTENTS} {PHASE} e4m3_max:f rng_state:P {plane_layout('row_tensor_amax')} "
    f"{plane_layout('col_tensor_amax')} {_OUTPUTS}"
)


def _share(tile: Pair, data: Tensor | None) -> str:
    if data is None:
        return _ABSENT
    return _RUN if 1 in tile else _SQUARE


def _is_idle(x: Tensor, *data: Tensor | None) -> bool:
    """Whether there is nothing to write."""
    return x.numel() == 0 or all(tensor is None for tensor in data)


def _load_bytes(x: Tensor, phase: Pair) -> int:
    size = x.element_size()
    return access_bytes(16, x.data_ptr(), x.shape[1] * size, phase[1] * size)


@cache
def float8(source: Source, code: str, shares: tuple[str, str], widths: tuple[int, int, int]) -> Spec:
    """Spec of an FP8 quantizer. `widths`: bytes read, written to row data, written to column data at a time."""
    constants = ", ".join((source.template, code, *shares, *map(str, widths)))
    return Spec("quantize_float8.cuh", f"QuantizeFloat8<{constants}>", layout(source, _FLOAT8))


def _float8_spec(x: Tensor, phase: Pair, fp8: str, shares: tuple[str, str], data: tuple[Tensor | None, ...]) -> Spec:
    rows, cols = x.shape
    widths = (
        _load_bytes(x, phase),
        access_bytes(8, pointer(data[0]), cols, phase[1]),
        access_bytes(16, pointer(data[1]), rows, phase[0]),
    )
    return float8(plain(ELEMENTS[x.dtype]), CODES[fp8], shares, widths)


def quantize_float8_tensor(
    x: Tensor, scale: Tensor, fp8: str, row_data: Tensor | None, col_data: Tensor | None
) -> None:
    """See te_dist.ops.quantize_float8_tensor."""
    if _is_idle(x, row_data, col_data):
        return
    shares = tuple(_ABSENT if data is None else _TENSOR for data in (row_data, col_data))
    spec = _float8_spec(x, (0, 0), fp8, shares, (row_data, col_data))
    outputs = (*_output(None, row_data, None), *_output(None, col_data, None))
    values = (x.data_ptr(), *x.shape, 0, 0, scale.data_ptr(), 0.0, 0, *outputs)
    launch(spec, x, (blocks_for(x.shape, PANEL), 1), values)


def quantize_float8_block(
    x: Tensor, phase: Pair, fp8: str, pow2: bool, eps: float, *planes: Pair | Tensor | None
) -> None:
    """See te_dist.ops.quantize_float8_block; `planes` are tile, amax, data and scale of both directions."""
    row_tile, row_amax, row_data, row_scale, col_tile, col_amax, col_data, col_scale = planes
    if _is_idle(x, row_data, col_data):
        return
    phase = phase_in(BLOCK_TILE, phase)
    shares = (_share(row_tile, row_data), _share(col_tile, col_data))
    spec = _float8_spec(x, phase, fp8, shares, (row_data, col_data))
    outputs = (*_output(row_amax, row_data, row_scale), *_output(col_amax, col_data, col_scale))
    values = (x.data_ptr(), *x.shape, *phase, 0, eps, pow2, *outputs)
    launch(spec, x, (blocks_for(x.shape, PANEL, phase), 1), values)


@cache
def mxfp8(source: Source, code: str, shares: tuple[str, str], widths: tuple[int, int, int]) -> Spec:
    """Spec of an MXFP8 quantizer. `widths`: bytes read, written to data, written to scales of a row at a time."""
    constants = ", ".join((source.template, code, *shares, *map(str, widths)))
    return Spec("quantize_mxfp8.cuh", f"QuantizeMxFp8<{constants}>", layout(source, _MXFP8))


def quantize_mxfp8(x: Tensor, phase: Pair, fp8: str, *planes: Pair | Tensor | None) -> None:
    """See te_dist.ops.quantize_mxfp8."""
    row_tile, row_amax, row_data, row_scale, col_tile, col_amax, col_data, col_scale = planes
    if _is_idle(x, row_data, col_data):
        return
    phase = phase_in(MX_TILE, phase)
    store = access_bytes(8, pointer(row_data), pointer(col_data), x.shape[1], phase[1])
    widths = (_load_bytes(x, phase), store, _scale_store_bytes(row_scale))
    shares = (_share(row_tile, row_data), _share(col_tile, col_data))
    spec = mxfp8(plain(ELEMENTS[x.dtype]), CODES[fp8], shares, widths)
    outputs = (*_output(row_amax, row_data, row_scale), *_output(col_amax, col_data, col_scale))
    launch(spec, x, (blocks_for(x.shape, PANEL, phase), 1), (x.data_ptr(), *x.shape, *phase, *outputs))


def _scale_store_bytes(scale: Tensor | None) -> int:
    """Bytes of one row's scales, four in a panel, that can be written at a time."""
    limit = PANEL[1] // MX_TILE[1]
    if scale is None:
        return limit
    rows, cols = scale.shape
    if scale.stride(1) != 1:
        return 1
    return access_bytes(limit, scale.data_ptr(), cols, scale.stride(0) if rows > 1 else 0)


_FOUR_OVER_SIX = {"none": "kNone", "mae": "kMeanAbsolute", "mse": "kMeanSquare"}


@cache
def nvfp4(source: Source, rule: tuple[str, str, str], shares: tuple[str, str], widths: tuple[int, ...]) -> Spec:
    """Spec of an NVFP4 quantizer.

    Args:
        source: of the input.
        rule: rounding, four-over-six, and whether every row has its own amax ("true", "false").
        shares: what shares a scale in each direction.
        widths: bytes read, written to row data, column data, row scales and column scales at a time.
    """
    rounding, four_over_six, amax_per_row = rule
    rule_type = f"NvFp4Rule<Rounding::{rounding}, FourOverSix::{four_over_six}, {amax_per_row}>"
    constants = ", ".join((source.template, rule_type, *shares, *map(str, widths)))
    return Spec("quantize_nvfp4.cuh", f"QuantizeNvFp4<{constants}>", layout(source, _NVFP4))


def _line_store_bytes(scale: Tensor | None, *, dim: int) -> int:
    """Bytes of the scales of one row (dim 1), or column (dim 0), of a panel that can be written at a time."""
    limit = PANEL[dim] // NVFP4_TILE[dim]
    if scale is None:
        return limit
    length, pitch = scale.shape[dim], scale.stride(1 - dim) if scale.shape[1 - dim] > 1 else 0
    return access_bytes(limit, scale.data_ptr(), length, pitch) if scale.stride(dim) == 1 else 0


def quantize_nvfp4(x: Tensor, phase: Pair, e4m3_max: int, four_over_six: str, *rest: Pair | Tensor | None) -> None:
    """See te_dist.ops.quantize_nvfp4."""
    *planes, rng_state = rest
    (row_tile, row_tensor_amax, row_amax, row_data, row_scale) = planes[:5]
    (col_tile, col_tensor_amax, col_amax, col_data, col_scale) = planes[5:]
    if _is_idle(x, row_data, col_data):
        return
    phase = phase_in(NVFP4_TILE, phase)
    rows, cols = x.shape
    widths = (
        _load_bytes(x, phase),
        access_bytes(4, pointer(row_data), cols // 2, phase[1] // 2) if row_data is not None else 4,
        access_bytes(16, pointer(col_data), rows // 2, phase[0] // 2) if col_data is not None else 16,
        _line_store_bytes(row_scale if row_data is not None else None, dim=1),
        _line_store_bytes(col_scale if col_data is not None else None, dim=0),
    )
    rounding = "kNearest"
    if rng_state is not None:
        rounding = "kStochastic" if phase[1] or cols % NVFP4_TILE[1] else "kStochasticAligned"
    shares = (_share(row_tile, row_data), _share(col_tile, col_data))
    per_row = "true" if row_tensor_amax is not None and row_tensor_amax.shape[0] > 1 else "false"
    rule = (rounding, _FOUR_OVER_SIX[four_over_six], per_row)
    spec = nvfp4(plain(ELEMENTS[x.dtype]), rule, shares, widths)
    amaxes = (*plane(row_tensor_amax), *plane(col_tensor_amax))
    outputs = (*_output(row_amax, row_data, row_scale), *_output(col_amax, col_data, col_scale))
    values = (x.data_ptr(), *x.shape, *phase, e4m3_max, pointer(rng_state), *amaxes, *outputs)
    launch(spec, x, (blocks_for(x.shape, PANEL, phase), 1), values)
