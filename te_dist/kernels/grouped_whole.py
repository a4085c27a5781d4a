"""Launches of products in groups whose sums are not scaled on the way: 16-bit values, FP8 with one scale."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from torch import Tensor

from te_dist.kernels import gemm
from te_dist.kernels.arguments import CODES, ELEMENTS, MatrixMap, matrix_map, pointer
from te_dist.kernels.gemm import BARRIER_BYTES, BOX_BYTES, NEXT_BYTES, SHARED_LIMIT
from te_dist.kernels.grouped_gemm import GROUPS, launch_everywhere, table_values
from te_dist.kernels.runtime import record
from te_dist.kernels.spec import Layout, Spec, once

ROWS = 128  # of a tile
_STAGE_BYTES = 128  # of what is summed over
_TILE_BYTES = 36  # what a consumer is told of one
_HELD_COLS = 128  # of tiles that hold in shared memory what they are added to
# Bytes that a row of an operand has for each group, up to which such tiles are the fastest: 1.45 times as fast as
# others at 512 of FP8, 1.05 at 2048 of bf16, 0.87 at 4096 of FP8.
_HELD_BYTES = 2048
_ENOUGH_TILES, _PROCESSORS = 128, 132
# TFLOP/s by the columns of a tile, where sums of 128 values are added in fp32: those of FP8 blocks in `ROWS_RATES`.
_RATES_IN_PARTS = {192: 1366, 128: 1183}
_COMMON = "a:T b:T " + gemm.OUTPUT + "a_scale_step:i b_scale_step:i a_scale:P b_scale:P "
_PRODUCTS = Layout(_COMMON + GROUPS + "tiles.rows:i tiles.col_tiles:i tiles.summed:i tiles.b_rows:i tiles.band:i")
_SUMS = Layout(_COMMON + GROUPS + "tiles.summed:i tiles.rows:i tiles.row_tiles:i tiles.col_tiles:i tiles.band:i")


@dataclass(frozen=True)
class Split:
    """How products are cut.

    Attributes:
        cols: of a tile; 128 or 256, or, where sums of 128 values are added in fp32, 128 or 192.
        cluster: blocks of threads one below the other along the rows that read B once for all, 1 or 2.
        band: tiles along the rows that are walked over together.
    """

    cols: int
    cluster: int
    band: int = 8

    @property
    def rows(self) -> int:
        """Of the tiles of a cluster."""
        return ROWS * self.cluster

    def shared_bytes(self, stages: int, *, adds: bool) -> int:
        """Dynamic shared memory of a block; laid out as `Shared` of the kernel."""
        stage = (ROWS + self.cols) * _STAGE_BYTES + _TILE_BYTES + 2 * BARRIER_BYTES
        boxes = 8 if adds and self.cols == _HELD_COLS else 4
        return -(-(stages * stage + NEXT_BYTES + boxes * BOX_BYTES + 2 * BARRIER_BYTES) // 1024) * 1024

    def stages(self, *, adds: bool) -> int:
        """As many as shared memory holds; `adds`: whether products are added to the output."""
        return next(n for n in range(8, 1, -1) if self.shared_bytes(n, adds=adds) <= SHARED_LIMIT)


def products_split(rows: int, cols: int, groups: int, itemsize: int) -> Split:
    """The fastest known for groups of this many rows together, of values of `itemsize` bytes.

    Clusters where few rows are nobody's. In small groups FP8 is multiplied faster than sums of large tiles are written.
    """
    width = _width(-(-rows // ROWS), cols)
    is_large = _is_large(rows, groups)
    return Split(128 if itemsize == 1 and not is_large else width, 2 if is_large else 1)


def products_in_parts_split(rows: int, cols: int, groups: int) -> Split:
    """The same where sums of 128 values are added in fp32; the last tile of each group is half full on average."""
    return Split(_width_in_parts(rows / ROWS + groups / 2, cols), 2 if _is_large(rows, groups) else 1)


def _is_large(rows: int, groups: int) -> bool:
    return rows >= 2048 * groups


def holds(summed: int, groups: int, itemsize: int) -> bool:
    """Whether sums over so many values of all groups are the fastest where tiles hold what they are added to."""
    return summed * itemsize <= _HELD_BYTES * groups


def sums_split(rows: int, cols: int, groups: int, *, held: bool = False) -> Split:
    """The fastest known for as many products of this shape as there are groups; `held`: see `holds`."""
    if held:
        return Split(_HELD_COLS, 1)
    return Split(_width(-(-rows // ROWS) * groups, cols), 2 if rows > ROWS else 1)


def sums_in_parts_split(rows: int, cols: int, groups: int, *, held: bool = False) -> Split:
    """The same where sums of 128 values are added in fp32."""
    width = _HELD_COLS if held else _width_in_parts(-(-rows // ROWS) * groups, cols)
    return Split(width, 2 if rows > ROWS else 1)


def _width_in_parts(row_tiles: float, cols: int) -> int:
    """Columns of a tile whose rounds, one tile for each processor, take the least time."""

    def time(width: int) -> float:
        return ceil(row_tiles * -(-cols // width) / _PROCESSORS) * width / _RATES_IN_PARTS[width]

    return min(_RATES_IN_PARTS, key=time)


def _width(row_tiles: int, cols: int) -> int:
    """Columns of a tile: large where there are enough of them for all processors."""
    return 256 if cols > 128 and row_tiles * -(-cols // 256) >= _ENOUGH_TILES else 128


class Operand(NamedTuple):
    """One side of a product.

    Attributes:
        element: as the kernel names it.
        turned: whether what is kept, not what is summed over, is contiguous.
    """

    element: str
    turned: bool = False

    @property
    def template(self) -> str:
        """What the kernel is told."""
        return f"Operand<{self.element}, Along::k{'Kept' if self.turned else 'Summed'}>"


@once
def whole(
    operands: tuple[Operand, ...],
    out: str,
    shape: Split,
    *,
    in_parts: bool = False,
    sums: bool = False,
    adds: bool = False,
) -> Spec:
    """Spec of products of rows in groups; or, `sums`, of such that sum over the rows of each.

    Args:
        operands: both sides; of FP8 where `in_parts`.
        out: type of the output.
        shape: how products are cut.
        in_parts: whether tensor cores sum 128 values at a time, to be added in fp32, instead of all of a sum.
        sums: whether it is rows that are summed over.
        adds: whether products are added to the output.
    """
    a, b = (operand.template for operand in operands)
    stages = shape.stages(adds=adds)
    walk, layout = ("GroupSums", _SUMS) if sums else ("GroupProducts", _PRODUCTS)
    numbers = (in_parts, shape.cols, shape.cluster, stages, adds)
    rest = ", ".join((out, *(str(number).lower() for number in numbers)))
    launched = {"shared_bytes": shape.shared_bytes(stages, adds=adds), "cluster": shape.cluster, "arch": "sm_90a"}
    return Spec("grouped_gemm.cuh", f"GroupedGemm<{walk}, {a}, {b}, {rest}>", layout, **launched)


def grouped_gemm_half(a: Tensor, b: Tensor, table: Tensor, summed_dim: int, *rest: Any) -> None:
    """See te_dist.ops.grouped_gemm_half."""
    element = ELEMENTS[a.dtype]
    operands = Operand(element), Operand(element, turned=summed_dim == 0)
    _products(operands, (a, b), (None, None), table, *rest)


def grouped_wgrad_half(a: Tensor, b: Tensor, table: Tensor, accumulate: bool, out: Tensor) -> None:
    """See te_dist.ops.grouped_wgrad_half."""
    operand = Operand(ELEMENTS[a.dtype], turned=True)
    _sums((operand, operand), (a, b), (None, None), table, accumulate, out)


def grouped_gemm_float8_tensor(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *rest: Any) -> None:
    """See te_dist.ops.grouped_gemm_float8_tensor."""
    table, fp8, fast, *others = rest
    operands = Operand(CODES[fp8[0]]), Operand(CODES[fp8[1]])
    _products(operands, (a, b), (a_scale, b_scale), table, *others, in_parts=not fast)


def grouped_wgrad_float8_tensor(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *rest: Any) -> None:
    """See te_dist.ops.grouped_wgrad_float8_tensor."""
    table, fp8, accumulate, out = rest
    operands = Operand(CODES[fp8[0]]), Operand(CODES[fp8[1]])
    _sums(operands, (a, b), (a_scale, b_scale), table, accumulate, out, in_parts=True)


def _products(
    operands: tuple[Operand, Operand],
    matrices: tuple[Tensor, Tensor],
    scales: tuple,
    *rest: Any,
    in_parts: bool = False,
) -> None:
    table, bias, row_factor, accumulate, out = rest
    (a, b), (rows, cols), groups = matrices, out.shape, table.shape[1] - 1
    if out.numel() == 0 or groups == 0:
        return
    gemm.check_alignment(a=a, b=b)
    if in_parts:
        shape = products_in_parts_split(rows, cols, groups)
    else:
        shape = products_split(rows, cols, groups, a.element_size())
    spec = whole(operands, ELEMENTS[out.dtype], shape, in_parts=in_parts, adds=accumulate)
    if out.is_meta:
        return record(spec)
    extents = (rows, -(-cols // shape.cols), a.shape[1], b.shape[0] // groups, shape.band)
    tiles = (*table_values(table, shape.rows), *extents)
    maps = _maps(operands, matrices, shape)
    launch_everywhere(spec, shape.cluster, (*maps, *gemm.output(out, bias, row_factor), *_scales(scales), *tiles), out)


def _sums(
    operands: tuple[Operand, Operand],
    matrices: tuple[Tensor, Tensor],
    scales: tuple,
    *rest: Any,
    in_parts: bool = False,
) -> None:
    table, accumulate, out = rest
    (a, b), (all_rows, cols), groups = matrices, out.shape, table.shape[1] - 1
    if gemm.is_trivial(a.numel(), out, accumulate=accumulate):
        return
    gemm.check_alignment(a=a, b=b)
    rows = all_rows // groups
    summed = a.shape[0 if operands[0].turned else 1]
    held = accumulate and holds(summed, groups, a.element_size())
    shape = (sums_in_parts_split if in_parts else sums_split)(rows, cols, groups, held=held)
    spec = whole(operands, ELEMENTS[out.dtype], shape, in_parts=in_parts, sums=True, adds=accumulate)
    if out.is_meta:
        return record(spec)
    tiles = (*table_values(table, ROWS), summed, rows, -(-rows // shape.rows), -(-cols // shape.cols), shape.band)
    maps = _maps(operands, matrices, shape)
    launch_everywhere(spec, shape.cluster, (*maps, *gemm.output(out, None, None), *_scales(scales), *tiles), out)


def _maps(operands: tuple[Operand, Operand], matrices: tuple[Tensor, Tensor], shape: Split) -> list[MatrixMap]:
    """Each in boxes of what a block reads at a time."""
    sides = zip(operands, matrices, (ROWS, shape.cols // shape.cluster), strict=True)
    return [
        matrix_map(matrix, (64, 64) if its.turned else (rows, _STAGE_BYTES // matrix.element_size()), swizzle=128)
        for its, matrix, rows in sides
    ]


def _scales(scales: tuple[Tensor | None, Tensor | None]) -> tuple[int, ...]:
    """Steps from group to group, and addresses."""
    steps = (0 if scale is None or scale.numel() == 1 else 1 for scale in scales)
    return (*steps, *map(pointer, scales))
