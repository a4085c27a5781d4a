"""Launches of matrix products. Arguments are those of the ops, in the order of their schemas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from te_dist.formats.region import Pair
from te_dist.kernels.arguments import CODES, ELEMENTS, MatrixMap, NoMap, matrix_map, pointer
from te_dist.kernels.runtime import launch, multiprocessors, record
from te_dist.kernels.spec import Layout, Spec

DEPTH = 128  # summed over at a time, by one scale
COLS = 128  # of a tile
_BOX_BYTES, _BARRIER_BYTES = 64 * 128, 8
_SHARED_LIMIT = 227 * 1024  # of a block, sm_90
_PROCESSORS = 132  # of an H100 or H200; a choice for another number of them costs time, not values
# TFLOP/s of an H200 by whether B has scales of squares, bytes of an output, (consumers, waves): 8192 x 8192 x 8192 in
# `python -m benchmarks.gemm_cuda --tilings`.
_RATES = {
    (True, 2): {(2, 1): 1158, (2, 2): 1396, (3, 1): 1317},
    (True, 4): {(2, 1): 1122, (2, 2): 1322, (3, 1): 1196},
    (False, 2): {(2, 1): 1006, (2, 2): 975, (3, 1): 1083},
    (False, 4): {(2, 1): 869, (2, 2): 1043, (3, 1): 1026},
}
_OUT_BYTES = {"BFloat16": 2, "Float16": 2, "Float32": 4}
_BIAS_TYPES = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_MAP_ALIGNMENT = 16
COMMON = "a:T a_scale:T b:T b_scale:T out:T bias:P row_factor:P out_data:P out_stride:q bias_type:i cols:i has_map:i "
_LAYOUT = Layout(COMMON + "tiles.rows:i tiles.row_tiles:i tiles.col_tiles:i tiles.depth_tiles:i tiles.band:i")


@dataclass(frozen=True)
class Tiling:
    """How a product is cut.

    Attributes:
        consumers: warpgroups that multiply, 2 or 3.
        waves: 64 rows that each of them computes one after the other.
        cluster: blocks of threads side by side along the columns that read the rows once for all.
        band: tiles along the rows that are walked over together.
    """

    consumers: int
    waves: int
    cluster: int
    band: int

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 64 * self.waves * self.consumers

    def shared_bytes(self, stages: int, square: bool, out_bytes: int, *, aligned: bool) -> int:
        """Dynamic shared memory of a block; laid out as `Shared` of the kernel. `aligned`: `kRowsAreAligned` there."""
        row_scales = self.rows if aligned else 2 * (-(-(self.rows // 2 + 4) // 32) * 32)
        scales = 4 * (row_scales + (32 if square else COLS))
        boxes = self.consumers * min(4, self.waves * out_bytes)  # of the output, on the way to memory
        ring = stages * ((self.rows + COLS) * DEPTH + scales + 2 * _BARRIER_BYTES)
        total = ring + boxes * _BOX_BYTES + self.consumers * _BARRIER_BYTES
        return -(-total // 1024) * 1024

    def stages(self, square: bool, out_bytes: int, *, aligned: bool) -> int:
        """As many as shared memory holds."""
        sizes = ((n, self.shared_bytes(n, square, out_bytes, aligned=aligned)) for n in range(8, 1, -1))
        return next(n for n, size in sizes if size <= _SHARED_LIMIT)


class Kind(NamedTuple):
    """What of a product the choice of a tiling depends on, besides its shape.

    Attributes:
        square: whether B has scales of squares.
        out_bytes: of a value of the output.
        adds: whether the product is added to the output.
    """

    square: bool
    out_bytes: int
    adds: bool = False


def tilings(cols: int, kind: Kind) -> list[Tiling]:
    """Those to choose from for an output of this many columns."""
    # What is added to is read into shared memory, which holds no more than one wave. Blocks side by side halve what is
    # read of A, which shows where tiles are large enough to wait for it.
    splits = ((2, 1), (3, 1)) if kind.adds else ((2, 1), (2, 2), (3, 1))
    return [Tiling(*split, 2 if split[1] > 1 and cols > COLS else 1, band=8) for split in splits]


def fastest(choice: Sequence[Tiling], row_tiles: Callable[[int], float], cols: int, kind: Kind) -> Tiling:
    """The tiling whose rounds of tiles, one tile for each processor, take the least time.

    Args:
        choice: what to choose from.
        row_tiles: number of tiles along the rows, by the rows of a tile.
        cols: of the output.
        kind: of the product.
    """

    def time(shape: Tiling) -> float:
        clusters = row_tiles(shape.rows) * -(-cols // (COLS * shape.cluster))
        return ceil(clusters / (_PROCESSORS // shape.cluster)) * shape.rows / rates[shape.consumers, shape.waves]

    rates = _RATES[kind.square, kind.out_bytes]
    return min(choice, key=time)


@cache
def tiling(rows: int, cols: int, kind: Kind) -> Tiling:
    """The fastest one for a product of this shape."""
    return fastest(tilings(cols, kind), lambda height: -(-rows // height), cols, kind)


class Variant(NamedTuple):
    """Of the kernel: the type of the output, whether B has scales of squares, the tiling, whether it adds to `out`."""

    out: str
    square: bool
    shape: Tiling
    adds: bool


def spec_of(walk: str, layout: Layout, codes: tuple[str, str], variant: Variant) -> Spec:
    """Spec of products whose tiles are those of `walk`."""
    out, square, shape, adds = variant
    place = (square, _OUT_BYTES[out])
    aligned = walk != "RowGroups"
    stages = shape.stages(*place, aligned=aligned)
    numbers = (square, shape.consumers, shape.waves, shape.cluster, stages, adds)
    constants = ", ".join((walk, *codes, out, *(str(number).lower() for number in numbers)))
    shared_bytes = shape.shared_bytes(stages, *place, aligned=aligned)
    launched = {"shared_bytes": shared_bytes, "cluster": shape.cluster, "arch": "sm_90a"}
    return Spec("gemm_float8_block.cuh", f"GemmFloat8Block<{constants}>", layout, **launched)


@cache
def float8_block(codes: tuple[str, str], out: str, square: bool, shape: Tiling, *, adds: bool = False) -> Spec:
    """Spec of one product."""
    return spec_of("OneProduct", _LAYOUT, codes, Variant(out, square, shape, adds))


def operand_maps(a: Tensor, b: Tensor, shape: Tiling) -> tuple[MatrixMap, MatrixMap]:
    """Of the codes of both operands."""
    rows = (shape.rows // shape.cluster, DEPTH)
    return matrix_map(a, rows, swizzle=128), matrix_map(b, (COLS, DEPTH), swizzle=128)


def common(
    maps: tuple[tuple[MatrixMap, MatrixMap], tuple[MatrixMap, MatrixMap]],
    out: Tensor,
    bias: Tensor | None,
    row_factor: Tensor | None,
) -> tuple[object, ...]:
    """Values of `COMMON`. `maps`: of the operands' codes, and of their scales."""
    (a, b), (a_scale, b_scale) = maps
    has_map = fits_map(out)
    out_map = matrix_map(out, (64, 128 // out.element_size()), swizzle=128) if has_map else NoMap()
    bias_type = _BIAS_TYPES[None if bias is None else bias.dtype]
    places = (pointer(bias), pointer(row_factor), out.data_ptr(), out.stride(0))
    return a, a_scale, b, b_scale, out_map, *places, bias_type, out.shape[1], has_map


def gemm_float8_block(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, b_tile: Pair, *rest: object) -> None:
    """See te_dist.ops.gemm_float8_block."""
    fp8, bias, accumulate, out = rest
    (rows, depth), cols = a.shape, b.shape[0]
    if out.numel() == 0:
        return
    if depth == 0:
        if not accumulate:
            out.zero_()
        if bias is not None:
            out.add_(bias)
        return
    check_alignment(a=a, a_scale=a_scale, b=b, b_scale=b_scale)
    square = b_tile[0] != 1
    shape = tiling(rows, cols, Kind(square, out.element_size(), accumulate))
    spec = float8_block((CODES[fp8[0]], CODES[fp8[1]]), ELEMENTS[out.dtype], square, shape, adds=accumulate)
    if out.is_meta:
        return record(spec)
    scale_maps = matrix_map(a_scale, (1, shape.rows)), matrix_map(b_scale, (1, 4 if square else COLS))
    values = common((operand_maps(a, b, shape), scale_maps), out, bias, None)
    row_tiles, col_tiles = -(-rows // shape.rows), -(-cols // (COLS * shape.cluster))
    tiles = (rows, row_tiles, col_tiles, -(-depth // DEPTH), shape.band)
    clusters = min(row_tiles * col_tiles, multiprocessors(out.get_device()) // shape.cluster)
    launch(spec, out, (clusters * shape.cluster, 1), (*values, *tiles))


def fits_map(matrix: Tensor) -> bool:
    """Whether the bulk copy engine can read and write a matrix and nothing beside it: it moves 16 bytes at a time."""
    (rows, cols), itemsize = matrix.shape, matrix.element_size()
    pitch = matrix.stride(0) * itemsize if rows > 1 else 0
    return (matrix.data_ptr() | pitch | cols * itemsize) % _MAP_ALIGNMENT == 0


def check_alignment(**operands: Tensor) -> None:
    """Raises ValueError where the bulk copy engine cannot read an operand."""
    for name, matrix in operands.items():
        if not fits_map(matrix):
            size = matrix.element_size()
            raise ValueError(
                f"{name}: got address {matrix.data_ptr():#x}, rows of {matrix.shape[1] * size} bytes and "
                f"{matrix.stride(0) * size} bytes apart, wanted all of them multiples of {_MAP_ALIGNMENT}; pad the "
                "dimension that is summed over with zeros, or copy the matrix"
            )
