"""Launches of the quantizers. Arguments are those of the ops, in the order of their schemas."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from te_dist.formats.region import Pair
from te_dist.kernels.amax import parts_task, zero
from te_dist.kernels.arguments import (
    CODES,
    EXTENTS,
    PANEL,
    access_bytes,
    blocks_for,
    phase_in,
    plane,
    plane_layout,
    pointer,
    store_bytes,
)
from te_dist.kernels.inputs import Input, Source, layout, plain, read
from te_dist.kernels.panels import ONE_MATRIX, SQUARE, TALL, WIDE, Lanes, Panels
from te_dist.kernels.spec import Spec, once
from te_dist.kernels.task import Task, Widths, start

BLOCK_TILE, MX_TILE, NVFP4_TILE = (128, 128), (32, 32), (16, 16)

ABSENT, _RUN, _SQUARE, TENSOR = (f"Share::k{name}" for name in ("Absent", "Run", "Square", "Tensor"))


def _output_layout(name: str) -> str:
    return f"{plane_layout(f'{name}.amax')} {name}.data:P {plane_layout(f'{name}.scale')}"


def output(amax: Tensor | None, data: Tensor | None, scale: Tensor | None) -> tuple[int, ...]:
    """Values of a `BlockOutput`."""
    return (*plane(amax), pointer(data), *plane(scale))


_OUTPUTS = f"{_output_layout('row')} {_output_layout('col')}"
_TENSOR_SCALE = "tensor.multiplier:P tensor.amaxes:P tensor.count:q tensor.amax:P"
_PANEL_GRID = "grid.across:I grid.reciprocal:I"
_NVFP4 = (
    f"noop:P {_PANEL_GRID} e4m3_max:f sign_mask:I col_rng_state:i rng_state:P "
    f"{plane_layout('row_tensor_amax')} {plane_layout('col_tensor_amax')} {_OUTPUTS}"
)
_DIRECTION_AMAX = f"{_PANEL_GRID} sign_mask:I row_amax:P col_amax:P is_each:i"


def share(tile: Pair, data: Tensor | None) -> str:
    """What shares a scale in a direction."""
    if data is None:
        return ABSENT
    return _RUN if 1 in tile else _SQUARE


def is_idle(x: Input, *data: Tensor | None) -> bool:
    """Whether there is nothing to write."""
    return x.numel() == 0 or all(tensor is None for tensor in data)


@once
def float8(
    source: Source,
    widths: Widths,
    *,
    code: str,
    shares: tuple[str, ...],
    panels: Panels = ONE_MATRIX,
    lanes: Lanes = SQUARE,
) -> Spec:
    """Spec of an FP8 quantizer. `widths`: bytes read, written to row data, written to column data at a time."""
    constants = ", ".join((source.template, code, *shares, *map(str, widths), panels.template, lanes.template))
    fields = f"{EXTENTS} {panels.fields} noop:P {_TENSOR_SCALE} eps:f pow2:i {_OUTPUTS}"
    return Spec("quantize_float8.cuh", f"QuantizeFloat8<{constants}>", layout(source, fields))


def _float8(x: Input, phase: Pair, shares: tuple[str, ...], *rest: Any) -> Task:
    fp8, row_data, col_data, values = rest
    x = x.in_pairs(phase[1])
    rows, cols = x.shape
    widths = (
        x.load_bytes(phase[1]),
        store_bytes(8, row_data, cols, phase[1]),
        store_bytes(16, col_data, rows, phase[0]),
    )
    lanes = float8_lanes(x.source, shares)
    kernel = partial(float8, code=CODES[fp8], shares=shares, lanes=lanes)
    shape = x.shape if x.numel() else (0, 1)  # one block writes the scale of an empty matrix
    blocks = max(1, blocks_for(x.walked, lanes.panel, phase))
    return Task(x, kernel, widths, (x.element_size(), 1, 1), blocks, (*shape, *phase, *values))


def _cast_task(x: Input, fp8: str, rule: tuple[int | float, ...], outputs: Sequence[Tensor | None]) -> Task:
    """A cast by one scale; `rule`: noop, where the scale comes from, eps and pow2, as parameters of the kernel."""
    row_data, row_scale, col_data, col_scale = outputs
    shares = tuple(ABSENT if data is None else TENSOR for data in (row_data, col_data))
    written = (*output(None, row_data, row_scale), *output(None, col_data, col_scale))
    return _float8(x, (0, 0), shares, fp8, row_data, col_data, (*rule, *written))


def float8_tensor_task(x: Input, scale: Tensor, fp8: str, amax: Tensor | None, *rest: Tensor | None) -> Task:
    """What quantize_float8_tensor launches."""
    *outputs, noop = rest
    return _cast_task(x, fp8, (pointer(noop), scale.data_ptr(), 0, 0, pointer(amax), 0.0, 0), outputs)


def quantize_float8_tensor(
    x: Tensor, source: str, beside: Sequence[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    """See te_dist.ops.quantize_float8_tensor."""
    start(float8_tensor_task(read(x, source, beside, sums, row_sums), *rest))


def float8_current_task(
    x: Input, fp8: str, pow2: bool, eps: float, amax: Tensor, workspace: None, *rest: Tensor | None
) -> Task:
    """What quantize_float8_current launches where the amax is given."""
    *outputs, noop = rest
    return _cast_task(x, fp8, (pointer(noop), 0, amax.data_ptr(), 1, 0, eps, pow2), outputs)


def quantize_float8_current(
    x: Tensor, source: str, beside: Sequence[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    """See te_dist.ops.quantize_float8_current."""
    fp8, pow2, eps, amax, workspace, *outputs, noop = rest
    matrix = read(x, source, beside, sums, row_sums)
    parts = parts_task(read(x, source, beside), noop, workspace) if amax is None and matrix.numel() else None
    start(parts)
    amaxes, count = (workspace, parts.blocks if parts else 0) if amax is None else (amax, 1)
    task = _cast_task(matrix, fp8, (pointer(noop), 0, amaxes.data_ptr(), count, 0, eps, pow2), outputs)
    start(task, overlaps=parts is not None)


def float8_block_task(x: Input, phase: Pair, fp8: str, pow2: bool, eps: float, *rest: Any) -> Task | None:
    """What quantize_float8_block launches; `rest`: tile, amax, data and scale of both directions, and noop."""
    row_tile, row_amax, row_data, row_scale, col_tile, col_amax, col_data, col_scale, noop = rest
    if is_idle(x, row_data, col_data):
        return None
    shares = (share(row_tile, row_data), share(col_tile, col_data))
    outputs = (*output(row_amax, row_data, row_scale), *output(col_amax, col_data, col_scale))
    rule = (pointer(noop), 0, 0, 0, 0, eps, pow2, *outputs)
    return _float8(x, phase_in(BLOCK_TILE, phase), shares, fp8, row_data, col_data, rule)


def quantize_float8_block(
    x: Tensor, source: str, beside: Sequence[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    """See te_dist.ops.quantize_float8_block."""
    start(float8_block_task(read(x, source, beside, sums, row_sums), *rest))


@once
def mxfp8(
    source: Source,
    widths: Widths,
    *,
    code: str,
    shares: tuple[str, ...],
    panels: Panels = ONE_MATRIX,
    lanes: Lanes = SQUARE,
) -> Spec:
    """Spec of an MXFP8 quantizer. `widths`: bytes read, written to data, written to scales of a row at a time."""
    constants = ", ".join((source.template, code, *shares, *map(str, widths), panels.template, lanes.template))
    fields = f"{EXTENTS} {panels.fields} noop:P {_OUTPUTS}"
    return Spec("quantize_mxfp8.cuh", f"QuantizeMxFp8<{constants}>", layout(source, fields))


def mxfp8_task(x: Input, phase: Pair, fp8: str, *rest: Any) -> Task | None:
    """What quantize_mxfp8 launches."""
    row_tile, row_amax, row_data, row_scale, col_tile, col_amax, col_data, col_scale, noop = rest
    if is_idle(x, row_data, col_data):
        return None
    phase = phase_in(MX_TILE, phase)
    x = x.in_pairs(phase[1])
    store = access_bytes(8, pointer(row_data), pointer(col_data), x.shape[1], phase[1])
    lanes = mxfp8_lanes(x)
    widths = (x.load_bytes(phase[1]), store, scale_store_bytes(row_scale, lanes))
    shares = (share(row_tile, row_data), share(col_tile, col_data))
    kernel = partial(mxfp8, code=CODES[fp8], shares=shares, lanes=lanes)
    outputs = (*output(row_amax, row_data, row_scale), *output(col_amax, col_data, col_scale))
    blocks = blocks_for(x.walked, lanes.panel, phase)
    values = (*x.shape, *phase, pointer(noop), *outputs)
    return Task(x, kernel, widths, (x.element_size(), 1, 1), blocks, values)


def quantize_mxfp8(
    x: Tensor, source: str, beside: Sequence[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    """See te_dist.ops.quantize_mxfp8."""
    start(mxfp8_task(read(x, source, beside, sums, row_sums), *rest))


def is_of_halves(source: Source) -> bool:
    """Whether it reads 16-bit elements and does no more: others have no registers for panels that are not square."""
    return source is plain("BFloat16") or source is plain("Float16")


def float8_lanes(source: Source, shares: tuple[str, ...]) -> Lanes:
    """More of a column is written at a time from a tall panel; tiles are those of square ones."""
    return TALL if shares == (ABSENT, TENSOR) and is_of_halves(source) else SQUARE


def mxfp8_lanes(x: Input) -> Lanes:
    """More of a row's scales are written at a time from a wide panel, if it is whole."""
    return WIDE if x.shape[1] % WIDE.panel[1] == 0 and is_of_halves(x.source) else SQUARE


def scale_store_bytes(scale: Tensor | None, lanes: Lanes) -> int:
    """Bytes of one row's scales in a panel that can be written at a time."""
    limit = lanes.panel[1] // MX_TILE[1]
    if scale is None:
        return limit
    rows, cols = scale.shape
    if scale.stride(1) != 1:
        return 1
    return access_bytes(limit, scale.data_ptr(), cols, scale.stride(0) if rows > 1 else 0)


FOUR_OVER_SIX = {"none": "kNone", "mae": "kMeanAbsolute", "mse": "kMeanSquare"}


@once
def nvfp4(
    source: Source,
    widths: Widths,
    *,
    rule: tuple[str, ...],
    shares: tuple[str, ...],
    panels: Panels = ONE_MATRIX,
) -> Spec:
    """Spec of an NVFP4 quantizer.

    Args:
        source: of the input.
        widths: bytes read, written to row data, column data, row scales and column scales at a time.
        rule: rounding; four-over-six; whether every row has its own amax, whether columns are transformed, as C++.
        shares: what shares a scale in each direction.
        panels: where they lie.
    """
    rounding, four_over_six, *flags = rule
    rule_type = f"NvFp4Rule<{', '.join((f'Rounding::{rounding}', f'FourOverSix::{four_over_six}', *flags))}>"
    constants = ", ".join((source.template, rule_type, *shares, *map(str, widths), panels.template))
    fields = f"{EXTENTS} {panels.fields} {_NVFP4}"
    return Spec("quantize_nvfp4.cuh", f"QuantizeNvFp4<{constants}>", layout(source, fields))


@once
def direction_amaxes(source: Source, widths: Widths, *, transforms: str, panels: Panels = ONE_MATRIX) -> Spec:
    """Spec of the amax of each direction. `transforms`: "true" where the columnwise one is of the transform."""
    constants = f"{source.template}, {transforms}, {widths[0]}, {panels.template}"
    fields = f"{EXTENTS} {panels.fields} {_DIRECTION_AMAX}"
    return Spec("direction_amax.cuh", f"DirectionAmax<{constants}>", layout(source, fields))


def direction_amax(x: Tensor, source: str, beside: Sequence[Tensor], *rest: Any) -> None:
    """See te_dist.ops.direction_amax."""
    hadamard, row_amax, col_amax = rest
    matrix = read(x, source, beside)
    outputs = [out for out in (row_amax, col_amax) if out is not None]
    for out in outputs:
        zero(out)
    if is_idle(matrix, *outputs):
        return
    kernel = partial(direction_amaxes, transforms=as_cpp(hadamard is not None))
    values = (*matrix.shape, 0, 0, *panel_grid(matrix, (0, 0)), hadamard or 0, pointer(row_amax), pointer(col_amax), 0)
    blocks = blocks_for(matrix.shape, PANEL)
    start(Task(matrix, kernel, (matrix.load_bytes(),), (matrix.element_size(),), blocks, values), overlaps=True)


def panel_grid(x: Input, phase: Pair) -> tuple[int, int]:
    """Values of a `PanelGrid`."""
    across = blocks_for((1, x.shape[1]), PANEL, (0, phase[1]))
    return across, min(2**32 - 1, 2**32 // across)


def as_cpp(flag: bool) -> str:
    """As a template argument."""
    return "true" if flag else "false"


def line_store_bytes(scale: Tensor | None, *, dim: int) -> int:
    """Bytes of the scales of one row (dim 1), or column (dim 0), of a panel that can be written at a time."""
    limit = PANEL[dim] // NVFP4_TILE[dim]
    if scale is None:
        return limit
    length, pitch = scale.shape[dim], scale.stride(1 - dim) if scale.shape[1 - dim] > 1 else 0
    return access_bytes(limit, scale.data_ptr(), length, pitch) if scale.stride(dim) == 1 else 0


def nvfp4_task(
    x: Input, phase: Pair, e4m3_max: int, four_over_six: str, hadamard: int | None, *rest: Any
) -> Task | None:
    """What quantize_nvfp4 launches."""
    *planes, rng_state, noop = rest
    (row_tile, row_tensor_amax, row_amax, row_data, row_scale) = planes[:5]
    (col_tile, col_tensor_amax, col_amax, col_data, col_scale) = planes[5:]
    if is_idle(x, row_data, col_data):
        return None
    phase = phase_in(NVFP4_TILE, phase)
    rows, cols = x.shape
    widths = (
        x.load_bytes(phase[1]),
        store_bytes(8, row_data, cols // 2, phase[1] // 2),
        store_bytes(16, col_data, rows // 2, phase[0] // 2),
        line_store_bytes(row_scale if row_data is not None else None, dim=1),
        line_store_bytes(col_scale if col_data is not None else None, dim=0),
    )
    rounding = "kNearest"
    if rng_state is not None:
        rounding = "kStochastic" if phase[1] or cols % NVFP4_TILE[1] else "kStochasticAligned"
    of_columns = 2 if rng_state is not None and rng_state.dim() == 2 else 0
    shares = (share(row_tile, row_data), share(col_tile, col_data))
    per_row = row_tensor_amax is not None and row_tensor_amax.shape[0] > 1
    flags = (per_row, hadamard is not None and col_data is not None)
    rule = (rounding, FOUR_OVER_SIX[four_over_six], *map(as_cpp, flags))
    kernel = partial(nvfp4, rule=rule, shares=shares)
    amaxes = (*plane(row_tensor_amax), *plane(col_tensor_amax))
    outputs = (*output(row_amax, row_data, row_scale), *output(col_amax, col_data, col_scale))
    options = (pointer(noop), *panel_grid(x, phase), e4m3_max, hadamard or 0, of_columns, pointer(rng_state))
    values = (*x.shape, *phase, *options, *amaxes, *outputs)
    return Task(x, kernel, widths, (x.element_size(), 1, 1, 0, 0), blocks_for(x.shape, PANEL, phase), values)


def quantize_nvfp4(
    x: Tensor, source: str, beside: Sequence[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    """See te_dist.ops.quantize_nvfp4."""
    start(nvfp4_task(read(x, source, beside, sums, row_sums), *rest))
