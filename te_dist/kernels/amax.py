"""Launches of what finds amaxes. Arguments are those of the ops, in the order of their schemas."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from te_dist.formats import WHOLE
from te_dist.formats.region import Pair
from te_dist.kernels.arguments import (
    EXTENTS,
    PANEL,
    PHASE,
    blocks_for,
    extents_of,
    phase_in,
    pointer,
)
from te_dist.kernels.inputs import Input, Source, layout, read
from te_dist.kernels.runtime import launch
from te_dist.kernels.spec import Layout, Spec, once
from te_dist.kernels.task import Task, Widths, start

MAX_PARTS = 512  # blocks that find the amax of a matrix: about as many as a GPU holds at a time
ZERO = Spec("tile_amax.cuh", "Zero", Layout("out:P count:q"))
_ZERO_THREADS, _ZERO_BLOCKS = 256, 1024
_MATRIX = f"{EXTENTS} noop:P out:P"
_TILES = f"{EXTENTS} {PHASE} tile.rows:q tile.cols:q out:P grid_cols:q strip:q"
_COLS = 2048  # columns that a block of threads reduces
_WARP_COLS, _THREAD_COLS = 256, 8
_STRIPS = (128, 64, 32, 16, 8)  # rows that it may reduce: fewer where blocks would be
_ENOUGH_BLOCKS, _FEW_BLOCKS = 2048, 512


@once
def of_matrix(source: Source, widths: Widths, *, parts: str) -> Spec:
    """Spec of the amax of a matrix. `widths`: bytes read at a time; `parts`: "true" for a magnitude of every block."""
    return Spec("tensor_amax.cuh", f"TensorAmax<{source.template}, {widths[0]}, {parts}>", layout(source, _MATRIX))


@once
def of_tiles(source: Source, widths: Widths, *, whole: str) -> Spec:
    """Spec of the amaxes of tiles. `widths`: bytes read at a time; `whole`: "true" where a block has all of a tile."""
    return Spec("tile_amax.cuh", f"TileAmax<{source.template}, {widths[0]}, {whole}>", layout(source, _TILES))


def _matrix_task(x: Input, noop: Tensor | None, out: Tensor, parts: str) -> Task:
    # A matrix without gaps may be cut into rows of any length: a panel of it is then one run of memory.
    shape = (x.numel() // PANEL[1], PANEL[1]) if x.is_plain and x.numel() % PANEL[1] == 0 else x.shape
    blocks = min(MAX_PARTS, blocks_for(shape, PANEL))
    values = (*shape, pointer(noop), out.data_ptr())
    return Task(x, partial(of_matrix, parts=parts), (x.load_bytes(),), (x.element_size(),), blocks, values)


def parts_task(x: Input, noop: Tensor | None, out: Tensor) -> Task:
    """Amaxes of parts of a matrix that is not empty, one for each block of the task, into `out` (f32, MAX_PARTS)."""
    return _matrix_task(x, noop, out, "true")


def amax_task(x: Input, phase: Pair, tile: Pair, out: Tensor) -> Task | None:
    """Raises `out` to the amax of every tile."""
    if x.numel() == 0:
        return None
    shape = x.shape
    if tuple(tile) == (WHOLE, WHOLE) and x.is_plain and x.numel() % _COLS == 0:
        shape = (x.numel() // _COLS, _COLS)  # one tile may be cut into rows of any length
    place = (shape, phase_in(tile, phase), extents_of(tile, shape))
    return _tiles_task(x, place, _strips(shape, (0, 0), (1, 1)), "false", out)


def _tiles_task(x: Input, place: tuple[Pair, Pair, Pair], strips: Pair, whole: str, out: Tensor) -> Task:
    shape, phase, tile = place
    strip, blocks = strips
    # Where strips are made of whole tiles, accesses begin where tiles do.
    load = x.load_bytes(phase[1] if whole == "true" else 0)
    values = (*shape, *phase, *tile, out.data_ptr(), out.shape[1], strip)
    return Task(x, partial(of_tiles, whole=whole), (load,), (x.element_size(),), blocks, values)


def tile_amax(x: Tensor, source: str, beside: Sequence[Tensor], *rest: Any) -> None:
    """See te_dist.ops.tile_amax."""
    phase, tile, out = rest
    if out.numel():
        _tile_amax(read(x, source, beside), phase, tile, out)


def zero(out: Tensor) -> None:
    """Writes zeros to f32 `out`, which has elements."""
    blocks = min(_ZERO_BLOCKS, -(-out.numel() // _ZERO_THREADS))
    launch(ZERO, out, (blocks, 1), (out.data_ptr(), out.numel()))


def _tile_amax(x: Input, phase: Pair, tile: Pair, out: Tensor) -> None:
    if _is_whole(tile):
        place = (x.shape, phase_in(tile, phase), (tile[0], tile[1]))
        strips = _strips(*place)
        # Few blocks of whole tiles leave the GPU idle, which costs more than raising, but where a tile is a column.
        if strips[1] >= _FEW_BLOCKS or tile[1] == 1:
            start(_tiles_task(x, place, strips, "true", out))
            return
    zero(out)
    if x.numel() and tuple(tile) == (WHOLE, WHOLE):
        start(_matrix_task(x, None, out, "false"), overlaps=True)
    else:
        start(amax_task(x, phase, tile, out), overlaps=True)


def _is_whole(tile: Pair) -> bool:
    """Whether strips can be made of whole tiles whose columns fall to one thread, or to a power of two of a warp's."""
    rows, cols = tile
    if WHOLE in (rows, cols):
        return False
    by_lanes = cols % _THREAD_COLS == 0 and _WARP_COLS % cols == 0
    return _STRIPS[0] % rows == 0 and (cols == 1 or by_lanes)


def _strips(shape: Pair, phase: Pair, tile: Pair) -> Pair:
    """Rows of a strip, and the number of blocks of threads."""
    strips = [strip for strip in _STRIPS if strip % tile[0] == 0]
    blocks = [blocks_for(shape, (strip, _COLS), phase) for strip in strips]
    chosen = next((i for i, count in enumerate(blocks) if count >= _ENOUGH_BLOCKS), -1)
    return strips[chosen], blocks[chosen]
