"""Launches of what writes a source, or looks at all of it. Arguments are those of the ops, in the order of schemas."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from te_dist.kernels.arguments import ELEMENTS, EXTENTS, INTEGERS, PANEL, access_bytes, blocks_for
from te_dist.kernels.inputs import GATHERED, Source, layout, read
from te_dist.kernels.runtime import launch
from te_dist.kernels.spec import Layout, Spec, once

_EVALUATE = f"{EXTENTS} out:P"
_RMS_RSTD = f"{EXTENTS} eps:f out:P"
_WIDEST = 16  # bytes
_RSTD_ROWS = 8  # rows of a block of threads
_GATHERED_ROWS, _LANES = 8, 32  # the same, of gathered rows and of sums of them, for which so many lanes each work
_ROWS_BY_NUMBER = Layout("x:P x_rows:q row_bytes:q index:P rows:q out:P")
_GATHERED = Layout("x:P x_rows:q cols:q positions:P rows:q copies:q out:P")


@once
def values(source: Source, widths: tuple[int, int]) -> Spec:
    """Spec of what writes a source. `widths`: bytes read and written at a time; 0 writes nothing but sums."""
    constants = ", ".join((source.template, *map(str, widths)))
    return Spec("evaluate.cuh", f"Evaluate<{constants}>", layout(source, _EVALUATE))


def evaluate(
    x: Tensor, source: str, beside: Sequence[Tensor], sums: Tensor | None, row_sums: Tensor | None, out: Tensor
) -> None:
    """See te_dist.ops.evaluate."""
    if out.numel() == 0:
        return
    input = read(x, source, beside, sums, row_sums)
    row_bytes = out.shape[1] * out.element_size()
    widths = (input.load_bytes(), access_bytes(_WIDEST, out.data_ptr(), row_bytes))
    if source == GATHERED + "plain" and sums is None:
        (index,) = beside
        arguments = (x.data_ptr(), x.shape[0], row_bytes, index.data_ptr(), index.shape[0], out.data_ptr())
        width = min(widths)
        lanes = 1 if row_bytes == width else _LANES
        blocks = (-(-index.shape[0] * lanes // (_GATHERED_ROWS * _LANES)), 1)
        return launch(rows_by_number(INTEGERS[index.dtype], width, lanes), x, blocks, arguments)
    arguments = (*input.values, *input.shape, out.data_ptr())
    launch(values(input.source, widths), x, (blocks_for(input.shape, PANEL), 1), arguments)


@once
def rows_by_number(index: str, width: int, lanes: int) -> Spec:
    """Spec of what writes gathered rows of a tensor. `width`: bytes read and written at a time; `lanes`: of a row."""
    return Spec("gather_rows.cuh", f"GatherRows<{index}, {width}, {lanes}>", _ROWS_BY_NUMBER)


def panel_sums(x: Tensor, source: str, beside: Sequence[Tensor], out: Tensor) -> None:
    """See te_dist.ops.panel_sums."""
    if out.numel() == 0:
        return
    input = read(x, source, beside, out)
    arguments = (*input.values, *input.shape, 0)
    launch(values(input.source, (input.load_bytes(), 0)), x, (blocks_for(input.shape, PANEL), 1), arguments)


@once
def rstd(source: Source, load: int) -> Spec:
    """Spec of what finds the root mean square of rows. `load`: bytes read at a time."""
    return Spec("rms_rstd.cuh", f"RmsRstd<{source.template}, {load}>", layout(source, _RMS_RSTD))


def rms_rstd(x: Tensor, eps: float, out: Tensor) -> None:
    """See te_dist.ops.rms_rstd."""
    if out.numel() == 0:
        return
    input = read(x, "plain", ())
    arguments = (*input.values, *input.shape, eps, out.data_ptr())
    launch(rstd(input.source, input.load_bytes()), x, (-(-x.shape[0] // _RSTD_ROWS), 1), arguments)


@once
def sums_of_rows(element: str, width: int) -> Spec:
    """Spec of sums of rows. `width`: bytes read and written at a time."""
    return Spec("gather_sum.cuh", f"GatherSum<{element}, {width}>", _GATHERED)


def gather_sum(x: Tensor, positions: Tensor, out: Tensor) -> None:
    """See te_dist.ops.gather_sum."""
    if out.numel() == 0:
        return
    (rows, copies), (x_rows, cols), itemsize = positions.shape, x.shape, x.element_size()
    widest = access_bytes(_WIDEST, x.data_ptr(), out.data_ptr(), cols * itemsize)
    values = (x.data_ptr(), x_rows, cols, positions.data_ptr(), rows, copies, out.data_ptr())
    spec = sums_of_rows(ELEMENTS[x.dtype], widest if widest == _WIDEST else itemsize)
    launch(spec, x, (-(-rows // _GATHERED_ROWS), 1), values)
