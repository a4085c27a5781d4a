"""Launches of quantizers of groups of rows. Arguments are those of the ops, in the order of their schemas."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from te_dist.formats.region import Pair
from te_dist.kernels import quantize
from te_dist.kernels.arguments import CODES, PANEL, access_bytes, pointer
from te_dist.kernels.inputs import Input, read
from te_dist.kernels.panels import GROUPED_ROWS, grouped_rows, tiles_at_most
from te_dist.kernels.runtime import launch
from te_dist.kernels.spec import Layout, Spec
from te_dist.kernels.task import Task, start

_SUMS_THREADS = 256
SUMS = Spec("group_sums.cuh", "GroupSums", Layout("sums:P panels:q cols:q tiles:P groups:q out:P"))


def group_sums(sums: Tensor, table: Tensor, out: Tensor) -> None:
    """See te_dist.ops.group_sums."""
    if out.numel() == 0:
        return
    groups, cols = out.shape
    tiles = table.data_ptr() + table.shape[1] * table.element_size()
    values = (sums.data_ptr(), sums.shape[0], cols, tiles, groups, out.data_ptr())
    launch(SUMS, out, (-(-out.numel() // _SUMS_THREADS), 1), values)


def _blocks(x: Input, table: Tensor) -> int:
    """For as many panels as there may be: how many there are the device alone knows."""
    rows, cols = x.shape
    return tiles_at_most(rows, table.shape[1] - 1) * -(-cols // PANEL[1])


def _float8(x: Input, table: Tensor, shares: tuple[str, str], *rest: object) -> Task:
    """`rest`: type, codes of both directions, values of the parameters behind the panels."""
    fp8, row_data, col_data, values = rest
    padded_rows = 0 if col_data is None else col_data.shape[1]
    widths = (
        x.load_bytes(),
        access_bytes(8, pointer(row_data), x.shape[1]),
        access_bytes(16, pointer(col_data), padded_rows),
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
    x: Tensor, source: str, beside: Sequence[Tensor], sums: Tensor | None, *rest: object
) -> None:
    """See te_dist.ops.grouped_quantize_float8_block."""
    table, fp8, pow2, eps, row_tile, row_data, row_scale, col_tile, col_data, col_scale, noop = rest
    matrix = read(x, source, beside, sums)
    if quantize.is_idle(matrix, row_data, col_data) or table.shape[1] == 1:
        return
    shares = (quantize.share(row_tile, row_data), quantize.share(col_tile, col_data))
    outputs = (
        *quantize.output(None, row_data, _row_scale(row_tile, row_scale)),
        *quantize.output(None, col_data, col_scale),
    )
    rule = (pointer(noop), 0, 0, 0, 0, eps, pow2, *outputs)
    start(_float8(matrix, table, shares, fp8, row_data, col_data, rule))
