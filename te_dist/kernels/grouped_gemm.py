"""Launches of products in groups. Arguments are those of the ops, in the order of their schemas."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from te_dist.kernels import gemm
from te_dist.kernels.arguments import CODES, ELEMENTS, INTEGERS, access_bytes, matrix_map, pointer
from te_dist.kernels.gemm import DEPTH, Extents, Kind, Rates, Tiling
from te_dist.kernels.runtime import launch, multiprocessors, record
from te_dist.kernels.spec import Layout, Spec, once

HEIGHTS = (128, 192, 256)  # of tiles, in the order of a group table's rows behind the first
_WIDEST = 16  # bytes
_REST_BLOCKS = 512  # that write zeros: enough for the whole of a GPU, most of which end at once where there is no rest
_TABLE = Layout("given:P groups:q rows:q table:P")
GROUPS = "tiles.table.begins:P tiles.table.tiles:P tiles.table.groups:q "
ROWS_FIELDS = "tiles.rows:i tiles.col_tiles:i tiles.depth_tiles:i tiles.b_rows:i tiles.b_scale_rows:i tiles.band:i"
SUMS_FIELDS = "tiles.tiles:i tiles.rows:i tiles.row_tiles:i tiles.col_tiles:i tiles.band:i"
_ROWS = Layout(gemm.COMMON + GROUPS + ROWS_FIELDS)
_SUMS = Layout(gemm.COMMON + GROUPS + SUMS_FIELDS)


@once
def find_groups(offset: str, *, are_sizes: bool) -> Spec:
    """Spec of what makes group tables of offsets, or of sizes, of one type."""
    constants = ", ".join((offset, str(are_sizes).lower(), *map(str, HEIGHTS)))
    return Spec("group_table.cuh", f"FindGroups<{constants}>", _TABLE)


def group_table(given: Tensor | None, are_sizes: bool, rows: int, table: Tensor) -> None:
    """See te_dist.ops.group_table."""
    offset = INTEGERS[torch.int64 if given is None else given.dtype]
    values = (pointer(given), table.shape[1] - 1, rows, table.data_ptr())
    launch(find_groups(offset, are_sizes=are_sizes), table, (1, 1), values)


@once
def rest(width: int) -> Spec:
    """Spec of zeros behind the last group; `width`: bytes written at a time."""
    return Spec("clear_rest.cuh", f"ClearRest<{width}>", Layout("out:P row_bytes:q rows:q end:P"))


def clear_rest(table: Tensor, out: Tensor) -> None:
    """See te_dist.ops.clear_rest."""
    rows, row_bytes = out.shape[0], out.shape[1] * out.element_size()
    if out.numel() == 0:
        return
    end = table.data_ptr() + (table.shape[1] - 1) * table.element_size()
    spec = rest(access_bytes(_WIDEST, out.data_ptr(), row_bytes))
    launch(spec, out, (_REST_BLOCKS, 1), (out.data_ptr(), row_bytes, rows, end))


# 8 groups of 32768 rows, N = 4096, K = 7168 in `python -m benchmarks.grouped_cuda --tilings`; of squares and 16 bits
# fitted, so that each shape is given what is fastest for it (benchmarks/results/grouped_blocks_cuda.md). With scales of
# runs, registers do not suffice for two waves, nor for a second tiling where products are added. Of what turns B: dgrad
# of that shape on an H100, from the same file; to 32 bits, which linear maps do not ask for, there is one tiling.
# Squares and sums to 16 bits, by what the kernel has gained since, as `gemm.RATES`.
ROWS_RATES: dict[Kind, Rates] = {
    Kind(True, 2): {
        Tiling(2, 1): 1218,
        Tiling(2, 2, 2): 1433,
        Tiling(3, 1, 2): 1499,
        Tiling(2, 1, cols=192): 1444,
    },
    Kind(True, 4): {Tiling(2, 1): 1190, Tiling(2, 2, 2): 1380, Tiling(3, 1): 1265, Tiling(2, 1, cols=192): 1343},
    Kind(True, 4, True): {Tiling(3, 1): 1155},
    Kind(True, 2, turns=True): {Tiling(2, 1): 756, Tiling(2, 2): 1117},
    Kind(True, 4, turns=True): {Tiling(2, 1): 741},
    Kind(True, 4, adds=True, turns=True): {Tiling(2, 1): 741},
    Kind(False, 2): {Tiling(2, 1): 932, Tiling(3, 1): 1046},
    Kind(False, 4): {Tiling(2, 1): 979, Tiling(3, 1): 1054},
    Kind(False, 4, True): {Tiling(3, 1): 967},
}
# The same sums over the rows of groups.
SUMS_RATES: dict[Kind, Rates] = {
    Kind(False, 2): {
        Tiling(2, 1): 981,
        Tiling(2, 2): 1103,
        Tiling(2, 2, 2): 1185,
        Tiling(3, 1): 1035,
        Tiling(3, 1, 2): 1063,
    },
    Kind(False, 4): gemm.RATES[Kind(False, 4)],
    Kind(False, 4, True): {Tiling(2, 1): 850, Tiling(2, 2, 2): 1085, Tiling(3, 1): 905},
}
# To begin and to write a tile takes longer with more waves, which counts where few tiles of the depth are summed.
# Fitted: 128 groups of 65536 rows, N = 1536 and 2048 there, are given what was measured fastest.
_BESIDE_SUMS = 0.57
# To turn B in shared memory makes a product slower by a fifth, however many rows read it; to transpose it in memory
# takes as long as that fifth does of 1600 to 2800 rows of each group (benchmarks/results/grouped_blocks_cuda.md).
_TURNED_ROWS = 1536


@lru_cache(maxsize=4096)
def rows_tiling(rows: int, cols: int, groups: int, depth_tiles: int, kind: Kind) -> Tiling:
    """For groups of this many rows together, of each of which the last tile is half full on average."""
    extents = Extents(lambda shape: rows / shape.rows + groups / 2, cols, depth_tiles)
    return gemm.fastest(ROWS_RATES[kind], extents, adds=kind.adds)


def is_turned_sooner(rows: int, groups: int) -> bool:
    """Whether a matrix of each group, which lies along what is kept, is multiplied as it lies sooner than transposed.

    rows: of all groups together.
    """
    return rows <= _TURNED_ROWS * groups


@lru_cache(maxsize=4096)
def sums_tiling(rows: int, cols: int, groups: int, depth_tiles: int, kind: Kind) -> Tiling:
    """For as many products of this shape as there are groups, which sum over this many tiles together."""
    extents = Extents(lambda shape: groups * shape.row_work(rows), cols, depth_tiles / groups, _BESIDE_SUMS)
    return gemm.fastest(SUMS_RATES[kind], extents, adds=kind.adds)


@once
def rows_float8_block(
    codes: tuple[str, str], out: str, square: bool, shape: Tiling, *, adds: bool = False, turns: bool = False
) -> Spec:
    """Spec of products of rows in groups."""
    return gemm.spec_of("RowGroups", _ROWS, codes, gemm.Variant(out, square, shape, adds, turns))


@once
def sums_float8_block(codes: tuple[str, str], out: str, shape: Tiling, *, adds: bool = False) -> Spec:
    """Spec of products that sum over the rows of groups."""
    return gemm.spec_of("DepthGroups", _SUMS, codes, gemm.Variant(out, False, shape, adds))


def grouped_gemm_float8_block(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *rest: Any) -> None:
    """See te_dist.ops.grouped_gemm_float8_block."""
    table, summed_dim, b_tile, fp8, bias, row_factor, accumulate, out = rest
    (rows, cols), groups, depth_tiles = out.shape, table.shape[1] - 1, -(-a.shape[1] // DEPTH)
    if out.numel() == 0 or groups == 0:
        return
    gemm.check_alignment(a=a, a_scale=a_scale, b=b, b_scale=b_scale)
    square, turns = b_tile[0] != 1, summed_dim == 0
    shape = rows_tiling(rows, cols, groups, depth_tiles, Kind(square, out.element_size(), accumulate, turns))
    spec = rows_float8_block(_codes(fp8), ELEMENTS[out.dtype], square, shape, adds=accumulate, turns=turns)
    if out.is_meta:
        return record(spec)
    a_scales = matrix_map(a_scale, (1, shape.rows // 2 + 4))  # tiles begin at any row: see the kernel
    b_scales = gemm.col_scale_map(b_scale, shape, square, turns=turns)
    maps = gemm.operand_maps(a, b, shape, turns=turns), (a_scales, b_scales)
    b_rows, b_scale_rows = b.shape[0] // groups, b_scale.shape[0] // groups
    extents = (rows, shape.col_tiles(cols), depth_tiles, b_rows, b_scale_rows, shape.band)
    tiles = (*table_values(table, shape.rows), *extents)
    launch_everywhere(spec, shape.cluster, (*gemm.common(maps, out, bias, row_factor), *tiles), out)


def grouped_wgrad_float8_block(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *rest: Any) -> None:
    """See te_dist.ops.grouped_wgrad_float8_block."""
    table, fp8, accumulate, out = rest
    rows, cols, groups = a.shape[0], b.shape[0], table.shape[1] - 1
    if gemm.is_trivial(a.shape[1], out, accumulate=accumulate):
        return
    gemm.check_alignment(a=a, a_scale=a_scale, b=b, b_scale=b_scale)
    shape = sums_tiling(rows, cols, groups, a.shape[1] // DEPTH, Kind(False, out.element_size(), accumulate))
    spec = sums_float8_block(_codes(fp8), ELEMENTS[out.dtype], shape, adds=accumulate)
    if out.is_meta:
        return record(spec)
    maps = (
        gemm.operand_maps(a, b, shape),
        (matrix_map(a_scale, (1, shape.rows)), gemm.col_scale_map(b_scale, shape, False)),
    )
    extents = (a.shape[1] // DEPTH, rows, shape.row_tiles(rows), shape.col_tiles(cols), shape.band)
    tiles = (*table_values(table, HEIGHTS[0]), *extents)
    launch_everywhere(spec, shape.cluster, (*gemm.common(maps, out, None, None), *tiles), out)


def _codes(fp8: tuple[str, str]) -> tuple[str, str]:
    return CODES[fp8[0]], CODES[fp8[1]]


def table_values(table: Tensor, height: int) -> tuple[int, int, int]:
    """Values of `GROUPS`: (first rows, tiles of this height before each group, groups)."""
    row_bytes = table.shape[1] * table.element_size()
    return table.data_ptr(), table.data_ptr() + (1 + HEIGHTS.index(height)) * row_bytes, table.shape[1] - 1


def launch_everywhere(spec: Spec, cluster: int, values: tuple[object, ...], out: Tensor) -> None:
    """How many tiles there are the device alone knows: there are blocks for all multiprocessors."""
    clusters = multiprocessors(out.get_device()) // cluster
    launch(spec, out, (clusters * cluster, 1), values)
