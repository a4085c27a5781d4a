"""A matrix from the rectangles, or the chunks of one dimension, that it was cut into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.ops._checks import check_dtype
from te_dist.ops._library import register


def assemble(wires: Sequence[Tensor], *, row_starts: Sequence[int], col_starts: Sequence[int], out: Tensor) -> None:
    """Copies each wire to `out[row_start : row_start + rows, col_start : col_start + cols]`.

    Args:
        wires: 2-D tensors of the dtype of `out`, contiguous along their last dimension.
        row_starts: first row of each wire.
        col_starts: first column of each wire.
        out: 2-D, contiguous along its last dimension.
    """
    _check_rows_contiguous("out", out)
    for index, (wire, row, col) in enumerate(zip(wires, row_starts, col_starts, strict=True)):
        name = f"wires[{index}]"
        check_dtype(name, wire, (out.dtype,))
        _check_rows_contiguous(name, wire)
        rows, cols = wire.shape
        if wire.numel() and (row < 0 or col < 0 or row + rows > out.shape[0] or col + cols > out.shape[1]):
            raise ValueError(f"{name}: got {rows} x {cols} at ({row}, {col}), wanted it inside {tuple(out.shape)}")
    torch.ops.te_dist.assemble(wires, row_starts, col_starts, out)


class Chunking(NamedTuple):
    """How rows are cut, and which of them share a value.

    Attributes:
        phase: of the first row inside of its grain.
        extent: number of rows.
        length: rows of each chunk but for the last ones, which have fewer or none.
        grain: rows behind one value.
    """

    phase: int
    extent: int
    length: int
    grain: int

    @property
    def num_values(self) -> int:
        """Of all rows."""
        return -(-(self.phase + self.extent) // self.grain) if self.extent else 0

    @property
    def most_values(self) -> int:
        """That a chunk has, at most."""
        return _most_values(self)


@lru_cache(maxsize=4096)
def _most_values(of: Chunking) -> int:
    if of.length >= of.extent:
        return of.num_values
    # NOTE: starts of chunks inside of grains come again after as many chunks as a grain has rows.
    starts = range(of.phase, of.phase + of.extent, of.length)[: of.grain]
    return max(-(-min(s + of.length, of.phase + of.extent) // of.grain) - s // of.grain for s in starts)


def assemble_chunks(gathered: Tensor, chunking: Chunking, *, dim: int, out: Tensor) -> None:
    """Puts together the chunks of one dimension of `out`, which lie in memory at equal distances, as ranks gather them.

    Chunk i of `gathered` begins with its values, contiguous in the order of the dimensions of `out`. Chunks that share
    a value have the same one.

    Args:
        gathered: (chunks, bytes), uint8, contiguous along its last dimension; more chunks than have rows may be there.
        chunking: of dimension `dim` of `out`.
        dim: that is cut.
        out: (members, outer, inner) or (outer, inner), contiguous along its last dimension.

    Raises:
        ValueError: a type or a size that does not fit.
    """
    check_dtype("gathered", gathered, (torch.uint8,))
    _check_rows_contiguous("gathered", gathered)
    members = out if out.dim() == 3 else out.unsqueeze(0)
    _check_rows_contiguous("out", members[0] if len(members) else members.flatten(0, 1))
    if not -out.dim() <= dim < out.dim():
        raise ValueError(f"dim: got {dim}, wanted one of the {out.dim()} of out")
    if chunking.length < 1 or chunking.grain < 1 or not 0 <= chunking.phase < chunking.grain:
        raise ValueError(f"chunking: got {chunking}, wanted rows in every chunk and grain, and a phase inside of it")
    if chunking.num_values != out.shape[dim]:
        raise ValueError(f"out: got {out.shape[dim]} values along {dim}, wanted {chunking.num_values} of {chunking}")
    wanted = -(-chunking.extent // chunking.length), _bytes_of_chunk(out, dim, chunking)
    if gathered.shape[0] < wanted[0] or (out.numel() and gathered.shape[1] < wanted[1]):
        raise ValueError(f"gathered: got shape {tuple(gathered.shape)}, wanted at least {wanted} of {chunking}")
    torch.ops.te_dist.assemble_chunks(gathered, chunking, dim % out.dim() + 3 - out.dim(), members)


def _bytes_of_chunk(out: Tensor, dim: int, chunking: Chunking) -> int:
    """Of the largest."""
    others = math.prod(n for d, n in enumerate(out.shape) if d != dim % out.dim())
    return others * chunking.most_values * out.element_size()


def _check_rows_contiguous(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 2 or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
        raise ValueError(
            f"{name}: got shape {tuple(tensor.shape)} and strides {tensor.stride()}, wanted a matrix with contiguous "
            "rows; call .contiguous()"
        )


def _cpu(wires: list[Tensor], row_starts: list[int], col_starts: list[int], out: Tensor) -> None:
    _C.assemble(wires, row_starts, col_starts, out, torch.get_num_threads())


register("assemble(Tensor[] wires, int[] row_starts, int[] col_starts, Tensor(a!) out) -> ()", _cpu, kernels.assemble)


def _chunks_on_cpu(gathered: Tensor, chunking: list[int], dim: int, out: Tensor) -> None:
    _C.assemble_chunks(gathered, chunking, dim, list(out), torch.get_num_threads())


register(
    "assemble_chunks(Tensor gathered, int[] chunking, int dim, Tensor(a!) out) -> ()",
    _chunks_on_cpu,
    kernels.assemble_chunks,
)
