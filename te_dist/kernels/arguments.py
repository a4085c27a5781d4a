"""Tensors as the arguments of kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_dist import _C
from te_dist.formats import WHOLE
from te_dist.formats.region import Pair

ELEMENTS = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}
CODES = {"e4m3": "E4M3", "e5m2": "E5M2"}
INTEGERS = {torch.int32: "int32_t", torch.int64: "int64_t"}

PANEL = (128, 128)  # elements that a block of threads takes, if nothing else is said

EXTENTS = "extents.rows:q extents.cols:q"
PHASE = "phase.row:q phase.col:q"


def plane_layout(name: str) -> str:
    """Fields of a `Plane`."""
    return f"{name}.data:P {name}.row_stride:q {name}.col_stride:q"


def pointer(tensor: Tensor | None) -> int:
    """Address of a tensor's first element; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def plane(tensor: Tensor | None) -> tuple[int, int, int]:
    """A matrix as values of a `Plane`. A dimension of extent 1 is read with stride 0, whichever the index.

    So is a single element, of however many dimensions.
    """
    if tensor is None:
        return 0, 0, 0
    if tensor.numel() == 1:
        return tensor.data_ptr(), 0, 0
    rows, cols = tensor.shape
    row_stride, col_stride = tensor.stride()
    return tensor.data_ptr(), row_stride if rows != 1 else 0, col_stride if cols != 1 else 0


_MAP_TYPES = {torch.uint8: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # of cuTensorMapEncodeTiled
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # of cuTensorMapEncodeTiled


class MatrixMap(NamedTuple):
    """A matrix with contiguous rows as the bulk copy engine copies it, in boxes.

    Attributes:
        address: of the first element; a multiple of 16 bytes, as is the pitch.
        place: type, rows, columns, bytes from row to row, rows and columns of a box, swizzle; as the driver wants them.
        device: of the memory.
    """

    address: int
    place: tuple[int, int, int, int, int, int, int]
    device: int

    def encoded(self) -> bytes:
        """The tensor map that a kernel takes."""
        kind, *rest = self.place
        return _C.cuda.matrix_map(self.device, kind, self.address, *rest)


class NoMap(NamedTuple):
    """In the place of a map that a kernel does not read."""

    address: int = 0

    def encoded(self) -> bytes:
        """Nothing."""
        return b""


def matrix_map(matrix: Tensor, box: Pair, *, swizzle: int = 0) -> MatrixMap:
    """Of a tensor, in boxes of (rows, cols); `swizzle`: bytes of a row that are permuted, 0, 32, 64 or 128."""
    (rows, cols), itemsize = matrix.shape, matrix.element_size()
    # NOTE: the pitch of a single row means nothing, but it is checked.
    pitch = (matrix.stride(0) if rows > 1 else -(-cols // 16) * 16) * itemsize
    kind = _MAP_TYPES[matrix.dtype]
    place = (kind, rows, cols, pitch, *box, _SWIZZLES[swizzle])
    return MatrixMap(matrix.data_ptr(), place, matrix.get_device())


def access_bytes(limit: int, *positions: int) -> int:
    """Bytes, at most `limit`, that can be read or written at a time where all `positions` (in bytes) may begin."""
    return math.gcd(limit, *positions)


def store_bytes(limit: int, data: Tensor | None, *positions: int) -> int:
    """The same of what is written behind the start of `data`; `limit` where nothing is, of which no kernel differs."""
    return limit if data is None else access_bytes(limit, data.data_ptr(), *positions)


def phase_in(tile: Pair, phase: Pair) -> Pair:
    """Offset inside a tile; it means nothing where a tile is the entire dimension."""
    row, col = (p % t if t != WHOLE else 0 for p, t in zip(phase, tile, strict=True))
    return row, col


def extents_of(tile: Pair, shape: Sequence[int]) -> Pair:
    """Extents of a tile, those of the matrix where it is the entire dimension; never 0."""
    rows, cols = (max(1, t if t != WHOLE else s) for t, s in zip(tile, shape, strict=True))
    return rows, cols


def blocks_for(shape: Sequence[int], block: Pair, phase: Pair = (0, 0)) -> int:
    """Number of blocks that cover a matrix whose first element lies `phase` inside the first block."""
    return math.prod(-(-(p + s) // b) for s, b, p in zip(shape, block, phase, strict=True))
