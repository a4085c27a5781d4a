"""Launches of what moves values. Arguments are those of the ops, in the order of their schemas."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from te_dist.kernels.arguments import ELEMENTS, EXTENTS, access_bytes, blocks_for
from te_dist.kernels.runtime import launch
from te_dist.kernels.spec import Layout, Spec, once

_HADAMARD_GROUP = 16
_HADAMARD_THREADS = 128
_HADAMARD = Layout(f"x:P out:P {EXTENTS} sign_mask:q")


@once
def transform(width: int) -> Spec:
    """Spec of a Hadamard transform; `width`: bytes read and written at a time."""
    return Spec("hadamard.cuh", f"Hadamard<{width}>", _HADAMARD)


def hadamard(x: Tensor, sign_mask: int, out: Tensor) -> None:
    """See te_dist.ops.hadamard."""
    if x.numel() == 0:
        return
    rows, cols = x.shape
    width = access_bytes(8, x.data_ptr(), out.data_ptr(), cols * x.element_size())
    threads = rows // _HADAMARD_GROUP * (cols * x.element_size() // width)
    blocks = -(-threads // _HADAMARD_THREADS)
    launch(transform(width), x, (blocks, 1), (x.data_ptr(), out.data_ptr(), rows, cols, sign_mask))


_TRANSPOSE = Layout(f"src:P out:P {EXTENTS} src_cols:q out_rows:q src_rows:q out_cols:q square:i")
_TURNED = {4: (256, 256), 8: (128, 256), 16: (128, 128), 32: (64, 128)}  # values that a block of threads moves, by bits


@once
def turn(bits: int, widths: tuple[int, int], *, squares: bool = False) -> Spec:
    """Spec of a transpose. `widths`: bytes read and written at a time; `squares`: of scales of squares."""
    template = f"Transpose<{bits}, {widths[0]}, {widths[1]}, {str(squares).lower()}>"
    return Spec("transpose.cuh", template, _TRANSPOSE)


def transpose(src: Tensor, bits: int, out: Tensor, square: int = 1) -> None:
    """See te_dist.ops.transpose."""
    if out.numel() == 0:
        return
    pack = 2 if bits == 4 else 1
    *matrices, rows, wide = src.shape
    *_, cols, long = out.shape
    widths = (
        access_bytes(16 // pack, src.data_ptr(), wide * src.element_size()),
        access_bytes(16, out.data_ptr(), long * out.element_size()),
    )
    turned = -(-rows // square), -(-cols // square)
    values = (src.data_ptr(), out.data_ptr(), *turned, pack * wide, pack * long, rows, cols, square)
    # As many as the longer lines of `out` need, which are written to their ends.
    blocks = blocks_for((pack * long, turned[1]), _TURNED[bits])
    launch(turn(bits, widths, squares=square > 1), src, (blocks, matrices[0] if matrices else 1), values)


_MAX_PARTS = 48  # rectangles of one launch
_PART = ("data:P", "stride:q", "rows:q", "row_bytes:q", "target:P")
_ASSEMBLE = Layout("out_stride:q " + " ".join(f"parts[{i}].{field}" for i in range(_MAX_PARTS) for field in _PART))
_ASSEMBLE_BLOCK_BYTES = 64 * 1024  # copied by one block of threads, about
_MAX_BLOCKS_PER_PART = 1024


@once
def copies(width: int) -> Spec:
    """Spec of a copy of rectangles; `width`: bytes at a time."""
    return Spec("assemble.cuh", f"Assemble<{width}>", _ASSEMBLE)


def assemble(wires: Sequence[Tensor], row_starts: Sequence[int], col_starts: Sequence[int], out: Tensor) -> None:
    """See te_dist.ops.assemble."""
    size, pitch = out.element_size(), out.stride(0) * out.element_size()
    parts = []
    for wire, row, col in zip(wires, row_starts, col_starts, strict=True):
        if wire.numel():
            rows, cols = wire.shape
            target = out.data_ptr() + row * pitch + col * size
            parts.append((wire.data_ptr(), wire.stride(0) * size, rows, cols * size, target))
    for first in range(0, len(parts), _MAX_PARTS):
        batch = parts[first : first + _MAX_PARTS]
        # Strides of one row mean nothing, and may be odd.
        strides = [stride for _, stride, rows, _, _ in batch if rows > 1]
        strides += [pitch] if any(rows > 1 for _, _, rows, _, _ in batch) else []
        positions = [number for data, _, _, row_bytes, target in batch for number in (data, row_bytes, target)]
        width = access_bytes(16, *strides, *positions)
        largest = max(rows * row_bytes for _, _, rows, row_bytes, _ in batch)
        blocks = min(_MAX_BLOCKS_PER_PART, -(-largest // _ASSEMBLE_BLOCK_BYTES))
        filled = (*batch, *((0, 0, 0, 0, 0),) * (_MAX_PARTS - len(batch)))
        values = (pitch, *(number for part in filled for number in part))
        launch(copies(width), out, (blocks, len(batch)), values)


_ASSEMBLE_CHUNKS = Layout(
    "gathered:P chunk_bytes:q out:P member_stride:q line_stride:q lines:q line_bytes:q value_bytes:q "
    "cut.phase:I cut.extent:I cut.length:I cut.grain:I"
)
_CHUNKS_TILE = (32, 32)  # lines and pieces that a block of threads copies


@once
def chunks(width: int, dim: int) -> Spec:
    """Spec of what puts chunks together; `width`: bytes at a time, `dim`: that is cut."""
    return Spec("assemble_chunks.cuh", f"AssembleChunks<{width}, {dim}>", _ASSEMBLE_CHUNKS)


def assemble_chunks(gathered: Tensor, chunking: Sequence[int], dim: int, out: Tensor) -> None:
    """See te_dist.ops.assemble_chunks."""
    if out.numel() == 0:
        return
    phase, extent, length, grain = chunking
    members, lines, values = out.shape
    size = out.element_size()
    strides = [stride * size if n > 1 else 0 for n, stride in zip(out.shape[:2], out.stride()[:2], strict=True)]
    line_bytes, pitch = values * size, gathered.stride(0) if len(gathered) > 1 else 0
    # Of a line that is cut, a piece lies in one chunk.
    pieces = line_bytes if dim < 2 or extent <= length else size if phase or length % grain else length // grain * size
    width = access_bytes(16, gathered.data_ptr(), pitch, out.data_ptr(), *strides, line_bytes, pieces)
    tiles = blocks_for((lines, line_bytes // width), _CHUNKS_TILE)
    arguments = (gathered.data_ptr(), pitch, out.data_ptr(), *strides, lines, line_bytes, size, *chunking)
    launch(chunks(width, dim), out, (tiles, members), arguments)


_ADD_PARTS = Layout("x:P count:q parts:i adds:i cols:q out:P pitch:q")
_THREADS = 256  # of a block that adds


@once
def sums_of_parts(element: str, width: int) -> Spec:
    """Spec of the sum of matrices below each other. `element`: type of what is written; `width`: values at a time."""
    return Spec("add_parts.cuh", f"AddParts<{element}, {width}>", _ADD_PARTS)


def add_parts(x: Tensor, accumulate: bool, out: Tensor) -> None:
    """See te_dist.ops.add_parts."""
    (rows, cols), size = out.shape, out.element_size()
    if out.numel() == 0:
        return
    pitch = out.stride(0) if rows > 1 else cols
    width = access_bytes(4, cols, pitch, out.data_ptr() // size, x.data_ptr() // 4)
    values = (x.data_ptr(), out.numel(), len(x) // rows, accumulate, cols, out.data_ptr(), pitch)
    launch(sums_of_parts(ELEMENTS[out.dtype], width), x, (-(-out.numel() // (width * _THREADS)), 1), values)
