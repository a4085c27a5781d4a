"""Launches of matrix products. Arguments are those of the ops, in the order of their schemas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_dist.formats.region import Pair
from te_dist.kernels.arguments import CODES, ELEMENTS, MatrixMap, NoMap, matrix_map, pointer
from te_dist.kernels.runtime import launch, multiprocessors, record
from te_dist.kernels.spec import Layout, Spec, once

DEPTH = 128  # summed over at a time, by one scale
_BOX_COL_BYTES, BARRIER_BYTES = 128, 8
BOX_BYTES = 64 * _BOX_COL_BYTES
_TILE_BYTES = 40  # of what says where a tile lies
NEXT_BYTES = _TILE_BYTES + 2 * BARRIER_BYTES  # of the next tile
SHARED_LIMIT = 227 * 1024  # of a block, sm_90
_PROCESSORS = 132  # of an H100 or H200; a choice for another number of them costs time, not values
_OUT_BYTES = {"BFloat16": 2, "Float16": 2, "Float32": 4}
_BIAS_TYPES = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_MAP_ALIGNMENT = 16
OUTPUT = "out:T bias:P row_factor:P out_data:P out_stride:q bias_type:i cols:i has_map:i "
COMMON = "a:T a_scale:T b:T b_scale:T " + OUTPUT
ONE_PRODUCT = (
    "tiles.rows:i tiles.row_tiles:i tiles.col_tiles:i tiles.depth_tiles:i "
    "tiles.part_tiles:i tiles.parts:i tiles.band:i tiles.phase.col:i tiles.phase.depth:i"
)
_LAYOUT = Layout(COMMON + ONE_PRODUCT)


@dataclass(frozen=True)
class Tiling:
    """How a product is cut.

    Attributes:
        consumers: warpgroups that multiply, 2 or 3.
        waves: 64 rows that each of them computes one after the other.
        cluster: blocks of threads side by side along the columns that read the rows once for all.
        cols: of a tile, 128 or, for scales of squares, 192.
        band: tiles along the rows that are walked over together.
    """

    consumers: int
    waves: int
    cluster: int = 1
    cols: int = 128
    band: int = 8

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 64 * self.waves * self.consumers

    def row_tiles(self, rows: int) -> int:
        """Along the rows of an output."""
        return -(-rows // self.rows)

    def row_work(self, rows: int) -> float:
        """Whole tiles that take as long as those along the rows: one of few rows takes about half the time of one."""
        whole, rest = divmod(rows, self.rows)
        return whole + (0.5 + 0.5 * rest / self.rows if rest else 0.0)

    def col_tiles(self, cols: int) -> int:
        """Of a cluster, along the columns of an output."""
        return -(-cols // (self.cols * self.cluster))

    def shared_bytes(self, stages: int, square: bool, out_bytes: int, *, aligned: bool, turns: bool = False) -> int:
        """Dynamic shared memory of a block; laid out as `Shared` of the kernel.

        Args:
            aligned: `kRowsAreAligned` there.
            turns: `kTurnsB` there.
        """
        row_scales = self.rows if aligned else 2 * (-(-(self.rows // 2 + 4) // 32) * 32)
        scales = 4 * (row_scales + (32 if square else self.cols))
        boxes = self.waves * self.cols * out_bytes // _BOX_COL_BYTES  # of a consumer's output, on the way to memory
        boxes = boxes if boxes % 2 else min(4, boxes)
        ring = stages * ((self.rows + self.cols) * DEPTH + scales + _TILE_BYTES + 2 * self.waves * BARRIER_BYTES)
        raw = BARRIER_BYTES * (stages if turns else 1)
        total = ring + raw + NEXT_BYTES + self.consumers * (boxes * BOX_BYTES + BARRIER_BYTES)
        return -(-total // 1024) * 1024

    def stages(self, square: bool, out_bytes: int, *, aligned: bool, turns: bool = False) -> int:
        """As many as shared memory holds."""
        sizes = ((n, self.shared_bytes(n, square, out_bytes, aligned=aligned, turns=turns)) for n in range(8, 1, -1))
        return next(n for n, size in sizes if size <= SHARED_LIMIT)


class Kind(NamedTuple):
    """What of a product the choice of a tiling depends on, besides its shape.

    Attributes:
        square: whether B has scales of squares.
        out_bytes: of a value of the output.
        adds: whether the product is added to the output.
        turns: whether B lies as (K, N), and is turned in shared memory.
    """

    square: bool
    out_bytes: int
    adds: bool = False
    turns: bool = False


Rates = dict[Tiling, int]  # TFLOP/s of each tiling to choose from, of an H200

# 8192 x 8192 x 8192 in `python -m benchmarks.gemm_cuda --tilings`, by what the kernel has gained since on an H100, one
# beside the other, on average of four shapes (benchmarks/results/gemm_cuda.md); of 128 rows by what it gained in fp32.
RATES: dict[Kind, Rates] = {
    Kind(True, 2): {
        Tiling(2, 1): 1230,
        Tiling(2, 2, 2): 1461,
        Tiling(3, 1, 2, band=12): 1499,
        Tiling(2, 1, cols=192): 1436,
    },
    Kind(True, 4): {Tiling(2, 1): 1190, Tiling(2, 2): 1282, Tiling(2, 2, 2): 1386, Tiling(2, 1, cols=192): 1343},
    Kind(True, 4, True): {Tiling(2, 1): 1109, Tiling(3, 1): 1155, Tiling(2, 2, 2): 1340},
    Kind(False, 2): {
        Tiling(2, 1): 932,
        Tiling(3, 1): 1046,
        Tiling(2, 2): 1090,
        Tiling(2, 2, 2): 1103,
        Tiling(3, 1, 2): 1064,
    },
    Kind(False, 4): {Tiling(2, 1): 979, Tiling(2, 2): 1136, Tiling(3, 1): 1054},
    Kind(False, 4, True): {Tiling(2, 1): 929, Tiling(2, 2, 2): 1089, Tiling(3, 1): 988},
}
# Picoseconds for a value that is added to, where memory is what they wait for: 128 groups of 65536 rows, N = 1536 in
# `python -m benchmarks.grouped_cuda --tilings`. One wave is added in shared memory, more by the copy engine.
_ADDING = {(2, 1): 2.6, (3, 1): 2.8, (2, 2): 3.9}
# Of sums that are cut into parts: bytes by picosecond and picoseconds of what adds these, tiles of the shortest ones
# that are cut, and what has to be gained.
_MEMORY_RATE, _ADDED_LAUNCH = 4, 5_000_000
_MOST_PARTS, _WORTH_CUTTING, _GAIN = 16, 32, 0.9


class Extents(NamedTuple):
    """Of a product: `row_tiles` says how many tiles lie along the rows, `depth_tiles` how many are summed.

    `beside`: by how many of those a tile takes longer, for each of its waves.
    """

    row_tiles: Callable[[Tiling], float]
    cols: int
    depth_tiles: float
    beside: float = 0.0


def fastest(rates: Rates, extents: Extents, *, adds: bool) -> Tiling:
    """The tiling of `rates` whose rounds of tiles, one tile for each processor, take the least time.

    `adds`: whether the product is added to the output.
    """
    return min(rates, key=lambda shape: _time(shape, rates[shape], extents, adds=adds))


def _time(shape: Tiling, rate: int, extents: Extents, *, adds: bool) -> float:
    """Picoseconds that one tiling takes."""
    clusters = extents.row_tiles(shape) * shape.col_tiles(extents.cols)
    depth_tiles = extents.depth_tiles + extents.beside * shape.waves
    value = 2 * DEPTH * depth_tiles / rate
    if adds:
        value = max(value, _ADDING[shape.consumers, shape.waves])
    rounds = ceil(clusters / (_PROCESSORS // shape.cluster))
    return rounds * shape.rows * shape.cols * _PROCESSORS * value


@lru_cache(maxsize=4096)  # numbers of rows may be others in every step
def tiling(rows: int, cols: int, depth_tiles: int, kind: Kind, parts: int = 1) -> Tiling:
    """The fastest one for a product of this shape, or for so many, each over `depth_tiles`."""
    return fastest(RATES[kind], _extents(rows, cols, depth_tiles, parts), adds=kind.adds)


def _extents(rows: int, cols: int, depth_tiles: int, parts: int) -> Extents:
    return Extents(lambda shape: parts * shape.row_work(rows), cols, depth_tiles)


@lru_cache(maxsize=4096)
def parts_of(rows: int, cols: int, depth_tiles: int, kind: Kind) -> int:
    """Into how many parts the sum of a product is cut: more than one where its tiles leave most processors without one.

    The parts are computed beside each other, in fp32, and added, which costs memory and a launch.
    """

    def time(parts: int) -> float:
        its = kind if parts == 1 else Kind(kind.square, _OUT_BYTES["Float32"])
        extents = _extents(rows, cols, part_tiles(depth_tiles, parts), parts)
        taken = min(_time(shape, rate, extents, adds=its.adds) for shape, rate in RATES[its].items())
        return taken if parts == 1 else taken + _ADDED_LAUNCH + 4 * (parts + 1) * rows * cols / _MEMORY_RATE

    if not is_narrow(rows, cols, depth_tiles):
        return 1
    best = min(range(1, _MOST_PARTS + 1), key=time)
    return best if time(best) < _GAIN * time(1) else 1


def is_narrow(rows: int, cols: int, depth_tiles: int) -> bool:
    """Whether a product sums over much for so few outputs that half of the processors have no tile."""
    return depth_tiles >= _WORTH_CUTTING and 2 * ceil(rows / DEPTH) * ceil(cols / DEPTH) <= _PROCESSORS


def part_tiles(depth_tiles: int, parts: int) -> int:
    """How many tiles of a sum each part has, the last ones fewer or none. Scales are read four at a time."""
    return depth_tiles if parts == 1 else 4 * ceil(depth_tiles / (4 * parts))


def evenly(tiles: int, most: int) -> int:
    """Of at most so many clusters, how many walk over the tiles: a few without one in the last round are left out.

    The others take no longer, draw less power and wait less for the L2 cache.
    """
    needed = ceil(tiles / ceil(tiles / most)) if tiles else 0
    return needed if needed > most * 15 // 16 else min(tiles, most)


class Variant(NamedTuple):
    """Of the kernel: the type of the output, whether B has scales of squares, the tiling, whether it adds to `out`.

    turns: whether B lies as (K, N), see `Kind`.
    """

    out: str
    square: bool
    shape: Tiling
    adds: bool
    turns: bool = False


def spec_of(walk: str, layout: Layout, codes: tuple[str, str], variant: Variant) -> Spec:
    """Spec of products whose tiles are those of `walk`."""
    out, square, shape, adds, turns = variant
    place = (square, _OUT_BYTES[out])
    kind = {"aligned": walk != "RowGroups", "turns": turns}
    stages = shape.stages(*place, **kind)
    numbers = (square, shape.consumers, shape.waves, shape.cols, shape.cluster, stages, adds, turns)
    constants = ", ".join((walk, *codes, out, *(str(number).lower() for number in numbers)))
    shared_bytes = shape.shared_bytes(stages, *place, **kind)
    launched = {"shared_bytes": shared_bytes, "cluster": shape.cluster, "arch": "sm_90a"}
    return Spec("gemm_float8_block.cuh", f"GemmFloat8Block<{constants}>", layout, **launched)


@once
def float8_block(codes: tuple[str, str], out: str, square: bool, shape: Tiling, *, adds: bool = False) -> Spec:
    """Spec of one product."""
    return spec_of("OneProduct", _LAYOUT, codes, Variant(out, square, shape, adds))


def operand_maps(a: Tensor, b: Tensor, shape: Tiling, *, turns: bool = False) -> tuple[MatrixMap, MatrixMap]:
    """Of the codes of both operands."""
    box = (DEPTH, shape.cols) if turns else (shape.cols, DEPTH)
    return matrix_map(a, (shape.rows // shape.waves, DEPTH), swizzle=128), matrix_map(b, box, swizzle=128)


def col_scale_map(b_scale: Tensor, shape: Tiling, square: bool, *, turns: bool = False) -> MatrixMap:
    """Of the scales of B: for a tile those of its columns, or of the squares that its columns lie in."""
    return matrix_map(b_scale, (1 if turns else -(-shape.cols // 128), 4) if square else (1, shape.cols))


def common(
    maps: tuple[tuple[MatrixMap, MatrixMap], tuple[MatrixMap, MatrixMap]],
    out: Tensor,
    bias: Tensor | None,
    row_factor: Tensor | None,
) -> tuple[object, ...]:
    """Values of `COMMON`. `maps`: of the operands' codes, and of their scales."""
    (a, b), (a_scale, b_scale) = maps
    return a, a_scale, b, b_scale, *output(out, bias, row_factor)


def output(out: Tensor, bias: Tensor | None, row_factor: Tensor | None) -> tuple[object, ...]:
    """Values of `OUTPUT`."""
    has_map = fits_map(out)
    out_map = matrix_map(out, (64, 128 // out.element_size()), swizzle=128) if has_map else NoMap()
    bias_type = _BIAS_TYPES[None if bias is None else bias.dtype]
    places = (pointer(bias), pointer(row_factor), out.data_ptr(), out.stride(0))
    return out_map, *places, bias_type, out.shape[1], has_map


def gemm_float8_block(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, b_tile: Pair, *rest: Any) -> None:
    """See te_dist.ops.gemm_float8_block."""
    phase, fp8, parts, bias, accumulate, out = rest
    (rows, depth), cols = a.shape, b.shape[0]
    if is_trivial(depth, out, bias=bias, accumulate=accumulate):
        return
    check_alignment(a=a, a_scale=a_scale, b=b, b_scale=b_scale)
    square = b_tile[0] != 1
    cols_in_tiles, depth_tiles = phase[0] + cols, -(-(phase[1] + depth) // DEPTH)
    in_part = part_tiles(depth_tiles, parts)
    shape = tiling(rows, cols_in_tiles, in_part, Kind(square, out.element_size(), accumulate), parts)
    spec = float8_block((CODES[fp8[0]], CODES[fp8[1]]), ELEMENTS[out.dtype], square, shape, adds=accumulate)
    if out.is_meta:
        return record(spec)
    scale_maps = matrix_map(a_scale, (1, shape.rows)), col_scale_map(b_scale, shape, square)
    values = common((operand_maps(a, b, shape), scale_maps), out, bias, None)
    row_tiles, col_tiles = shape.row_tiles(rows), shape.col_tiles(cols_in_tiles)
    tiles = (rows, row_tiles, col_tiles, depth_tiles, in_part, parts, shape.band, *phase)
    clusters = evenly(row_tiles * col_tiles * parts, multiprocessors(out.get_device()) // shape.cluster)
    launch(spec, out, (clusters * shape.cluster, 1), (*values, *tiles))


def is_trivial(extent: int, out: Tensor, *, accumulate: bool, bias: Tensor | None = None) -> bool:
    """Whether a product has no values, or sums over nothing; `out` is then what it has to be."""
    if out.numel() and extent == 0:
        if not accumulate:
            out.zero_()
        if bias is not None:
            out.add_(bias)
    return out.numel() == 0 or extent == 0


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
                f"{matrix.stride(0) * size} bytes apart, wanted all of them multiples of {_MAP_ALIGNMENT}; pad its "
                "last dimension, that of codes with zeros, or copy the matrix"
            )
