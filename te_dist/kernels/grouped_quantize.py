"""Launches of quantizers of groups of rows. Arguments are those of the ops, in the order of their schemas."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from te_dist.formats.region import Pair
from te_dist.kernels import quantize
from te_dist.kernels.amax import zero
from te_dist.kernels.arguments import CODES, EXTENTS, PANEL, access_bytes, plane, pointer, store_bytes
from te_dist.kernels.inputs import Input, Source, layout, read
from te_dist.kernels.panels import GROUPED_ROWS, SQUARE, Lanes, grouped_rows, tiles_at_most
from te_dist.kernels.runtime import launch
from te_dist.kernels.spec import Layout, Spec, once
from te_dist.kernels.task import Task, Widths, start

_THREADS = 256
_AMAX_COLS = 4 * PANEL[1]  # that a block of threads takes
SUMS = Spec("group_sums.cuh", "GroupSums", Layout("sums:P panels:q cols:q tiles:P groups:q out:P"))


def group_sums(sums: Tensor, table: Tensor, out: Tensor) -> None:
    """See te_dist.ops.group_sums."""
    if out.numel() == 0:
        return
    groups, cols = out.shape
    tiles = table.data_ptr() + table.shape[1] * table.element_size()
    values = (sums.data_ptr(), sums.shape[0], cols, tiles, groups, out.data_ptr())
    launch(SUMS, out, (-(-out.numel() // _THREADS), 1), values)


@once
def amaxes(source: Source, widths: Widths) -> Spec:
    """Spec of the amax of groups. `widths`: bytes read at a time."""
    fields = f"{EXTENTS} {GROUPED_ROWS.fields} out:P is_each:i"
    return Spec("group_amax.cuh", f"GroupAmax<{source.template}, {widths[0]}>", layout(source, fields))


def grouped_amax(x: Tensor, source: str, beside: Sequence[Tensor], table: Tensor, out: Tensor) -> None:
    """See te_dist.ops.grouped_amax."""
    if out.numel() == 0:
        return
    zero(out)
    matrix = read(x, source, beside)
    rows, cols = matrix.shape
    blocks = tiles_at_most(rows, table.shape[1] - 1) * -(-cols // _AMAX_COLS)
    if blocks == 0:
        return
    values = (rows, cols, *grouped_rows(table, 0), out.data_ptr(), out.numel() > 1)
    start(Task(matrix, amaxes, (matrix.load_bytes(),), (matrix.element_size(),), blocks, values), overlaps=True)


def grouped_direction_amax(x: Tensor, source: str, beside: Sequence[Tensor], table: Tensor, *rest: Any) -> None:
    """See te_dist.ops.grouped_direction_amax."""
    hadamard, row_amax, col_amax = rest
    outputs = [out for out in (row_amax, col_amax) if out is not None and out.numel()]
    for out in outputs:
        zero(out)
    matrix = read(x, source, beside)
    blocks = _blocks(matrix, table)
    if not outputs or not blocks:
        return
    kernel = partial(quantize.direction_amaxes, transforms=quantize.as_cpp(hadamard is not None), panels=GROUPED_ROWS)
    panels = (*grouped_rows(table, 0), *quantize.panel_grid(matrix, (0, 0)))
    values = (*matrix.shape, *panels, hadamard or 0, pointer(row_amax), pointer(col_amax), outputs[0].numel() > 1)
    start(Task(matrix, kernel, (matrix.load_bytes(),), (matrix.element_size(),), blocks, values), overlaps=True)


def _blocks(x: Input, table: Tensor, lanes: Lanes = SQUARE) -> int:
    """For as many panels as there may be: how many there are the device alone knows."""
    (rows, cols), (high, wide) = x.walked, lanes.panel
    return tiles_at_most(rows, table.shape[1] - 1) * (PANEL[0] // high) * -(-cols // wide)


def _float8(x: Input, table: Tensor, shares: tuple[str, ...], *rest: Any) -> Task:
    """`rest`: type, codes of both directions, values of the parameters behind the panels."""
    fp8, row_data, col_data, values = rest
    x = x.in_pairs()
    padded_rows = 0 if col_data is None else col_data.shape[1]
    widths = (
        x.load_bytes(),
        store_bytes(8, row_data, x.shape[1]),
        store_bytes(16, col_data, padded_rows),
    )
    kernel = partial(quantize.float8, code=CODES[fp8], shares=shares, panels=GROUPED_ROWS)
    shape = x.shape if x.numel() else (0, 1)  # one block writes the scales of empty groups
    blocks = max(1, _blocks(x, table))
    values = (*shape, *grouped_rows(table, padded_rows), *values)
    return Task(x, kernel, widths, (x.element_size(), 1, 1), blocks, values)


def _row_scale(tile: Pair, scale: Tensor | None) -> Tensor | None:
    """In order (row, col) of the grid."""
    return scale.t() if scale is not None and tile[0] == 1 else scale


def grouped_quantize_float8_block(
    x: Tensor, source: str, beside: Sequence[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    """See te_dist.ops.grouped_quantize_float8_block."""
    table, fp8, pow2, eps, row_tile, row_data, row_scale, col_tile, col_data, col_scale, noop = rest
    matrix = read(x, source, beside, sums, row_sums)
    if quantize.is_idle(matrix, row_data, col_data) or table.shape[1] == 1:
        return
    shares = (quantize.share(row_tile, row_data), quantize.share(col_tile, col_data))
    outputs = (
        *quantize.output(None, row_data, _row_scale(row_tile, row_scale)),
        *quantize.output(None, col_data, col_scale),
    )
    rule = (pointer(noop), 0, 0, 0, 0, eps, pow2, *outputs)
    start(_float8(matrix, table, shares, fp8, row_data, col_data, rule))


def _cast(x: Input, table: Tensor, fp8: str, rule: tuple[int | float, ...], outputs: Sequence[Tensor | None]) -> None:
    """A cast by given scales; `rule`: noop, where they come from, eps and pow2, as parameters of the kernel."""
    row_data, row_scale, col_data, col_scale = outputs
    if rule[3] == 0:  # scales: those of no group, where there is not one for all
        return
    shares = tuple(quantize.ABSENT if data is None else quantize.TENSOR for data in (row_data, col_data))
    written = tuple(
        value
        for data, scale in ((row_data, row_scale), (col_data, col_scale))
        for value in (0, 0, 0, pointer(data), pointer(scale), 0, 0)
    )
    start(_float8(x, table, shares, fp8, row_data, col_data, (*rule, *written)))


def grouped_quantize_float8_tensor(
    x: Tensor, source: str, beside: Sequence[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    """See te_dist.ops.grouped_quantize_float8_tensor."""
    scale, table, fp8, amax, *outputs, noop = rest
    rule = (pointer(noop), scale.data_ptr(), 0, scale.numel(), pointer(amax), 0.0, 0)
    _cast(read(x, source, beside, sums, row_sums), table, fp8, rule, outputs)


def grouped_quantize_float8_current(
    x: Tensor, source: str, beside: Sequence[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    """See te_dist.ops.grouped_quantize_float8_current."""
    amax, table, fp8, pow2, eps, *outputs, noop = rest
    rule = (pointer(noop), 0, amax.data_ptr(), amax.numel(), 0, eps, pow2)
    _cast(read(x, source, beside, sums, row_sums), table, fp8, rule, outputs)


def grouped_quantize_mxfp8(
    x: Tensor, source: str, beside: Sequence[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    """See te_dist.ops.grouped_quantize_mxfp8."""
    table, fp8, row_tile, row_data, row_scale, col_tile, col_data, col_scale, noop = rest
    matrix = read(x, source, beside, sums, row_sums).in_pairs()
    if quantize.is_idle(matrix, row_data, col_data) or table.shape[1] == 1:
        return
    rows, cols = matrix.shape
    if row_scale is not None:
        row_scale = row_scale[:rows, : -(-cols // quantize.MX_TILE[1])]
    store = access_bytes(8, pointer(row_data), pointer(col_data), cols)
    lanes = quantize.mxfp8_lanes(matrix)
    widths = (matrix.load_bytes(), store, quantize.scale_store_bytes(row_scale, lanes))
    shares = (quantize.share(row_tile, row_data), quantize.share(col_tile, col_data))
    kernel = partial(quantize.mxfp8, code=CODES[fp8], shares=shares, panels=GROUPED_ROWS, lanes=lanes)
    outputs = (*quantize.output(None, row_data, row_scale), *quantize.output(None, col_data, col_scale))
    panels = grouped_rows(table, 0 if col_data is None else col_data.shape[0])
    values = (rows, cols, *panels, pointer(noop), *outputs)
    start(Task(matrix, kernel, widths, (matrix.element_size(), 1, 1), _blocks(matrix, table, lanes), values))


def grouped_quantize_nvfp4(
    x: Tensor, source: str, beside: Sequence[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    """See te_dist.ops.grouped_quantize_nvfp4."""
    table, e4m3_max, four_over_six, hadamard, *planes, rng_state, noop = rest
    row_tile, row_amax, row_data, row_scale, col_tile, col_amax, col_data, col_scale = planes
    matrix = read(x, source, beside, sums, row_sums)
    if quantize.is_idle(matrix, row_data, col_data) or table.shape[1] == 1:
        return
    (rows, cols), padded_rows = matrix.shape, 0
    if row_data is not None:
        row_scale = row_scale[:rows, : -(-cols // quantize.NVFP4_TILE[1])]
    if col_data is not None:
        padded_rows = 2 * col_data.shape[1]
        col_scale = col_scale[:cols, : padded_rows // quantize.NVFP4_TILE[0]].t()
    widths = (
        matrix.load_bytes(),
        store_bytes(8, row_data, cols // 2),
        store_bytes(16, col_data, padded_rows // 2),
        quantize.line_store_bytes(row_scale if row_data is not None else None, dim=1),
        quantize.line_store_bytes(col_scale if col_data is not None else None, dim=0),
    )
    rounding = "kNearest" if rng_state is None else "kStochasticAligned"
    transforms = quantize.as_cpp(hadamard is not None and col_data is not None)
    rule = (rounding, quantize.FOUR_OVER_SIX[four_over_six], "false", transforms)
    shares = (quantize.share(row_tile, row_data), quantize.share(col_tile, col_data))
    kernel = partial(quantize.nvfp4, rule=rule, shares=shares, panels=GROUPED_ROWS)
    of_columns = 2 if rng_state is not None and rng_state.dim() == 2 else 0
    values = (
        *(rows, cols, *grouped_rows(table, padded_rows), pointer(noop), *quantize.panel_grid(matrix, (0, 0))),
        *(e4m3_max, hadamard or 0, of_columns, pointer(rng_state), *_each(row_amax), *_each(col_amax)),
        *(*quantize.output(None, row_data, row_scale), *quantize.output(None, col_data, col_scale)),
    )
    start(Task(matrix, kernel, widths, (matrix.element_size(), 1, 1, 0, 0), _blocks(matrix, table), values))


def _each(amax: Tensor | None) -> tuple[int, ...]:
    """Values of a `Plane` with a row for each group, or one for all."""
    return (0, 0, 0) if amax is None else plane(amax[:, None])
