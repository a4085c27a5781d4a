"""Collectives of sequence and tensor parallelism, each with its gradient.

`gather` sends quantized bytes. What is summed (`reduce_scatter`, `all_reduce`) is sent in high precision: a sum of
quantized values is none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from te_dist.formats import Direction, Format, Partition, Region
from te_dist.tensor import QuantizedStorage, QuantizedTensor, collectives, empty
from te_dist.tensor_parallel.cuts import SequenceCut
from te_dist.tensor_parallel.spread import FormatWriter, RunsStorage, SpreadStorage, Writer, check_shared_scales
from te_dist.tensor_parallel.wires import gather_rows


def gather(
    x: Tensor, format: Format, group: dist.ProcessGroup, *, dim: int = 0, size: int | None = None
) -> QuantizedTensor:
    """All ranks' parts of a tensor, put together along `dim`, quantized: bit for bit the quantization of the whole.

    Each rank quantizes its rows where they lie in the whole, after one reduction of the amaxes that parts share (none
    where no scale is), and sends the bytes and scales of its canonical fields, less what is the same on all ranks. A
    direction that can be derived from these is left to those who read it. The gradient is plain: it is summed over
    ranks, and each takes its part.

    Args:
        x: (..., K), this rank's part; fp32, bf16 or fp16.
        format: with the directions that are wanted.
        group: its ranks hold the parts in order.
        dim: along which the whole is cut, not the last.
        size: extent of `dim` in the whole, cut as `torch.chunk` cuts; by default all parts are as long as this one.

    Raises:
        ValueError: the cut goes through a stored byte of `format`; on all ranks alike, before any collective.
    """
    return gather_by(FormatWriter(format), x, format.directions, group=group, cut=_cut_of(x, dim, size, group))


def gather_by(
    writer: Writer, x: Tensor, directions: Sequence[Direction], *, group: dist.ProcessGroup, cut: SequenceCut
) -> QuantizedTensor:
    """`gather` in the format of a quantizer, of the `directions` it has among these."""
    return _Gather.apply(x, writer, tuple(directions), group, cut)


def gather_values(
    x: Tensor,
    group: dist.ProcessGroup,
    *,
    dim: int = 0,
    size: int | None = None,
    gradient: Literal["sum", "part"] = "sum",
) -> Tensor:
    """`gather` in the dtype of `x`, for what is not quantized.

    Args:
        gradient: each rank gets its part of the "sum" of the gradients, or its "part" of one that is the sum already.
    """
    return _GatherValues.apply(x, group, _cut_of(x, dim, size, group), gradient)


def reduce_scatter(
    x: Tensor, group: dist.ProcessGroup, *, dim: int = 0, gradients: GradientGather | None = None
) -> Tensor:
    """The sum of all ranks' `x`, cut along `dim` as `torch.chunk` cuts; each rank gets its part.

    Its gradient is gathered: quantized by `gradients`, in high precision without.
    """
    return _ReduceScatter.apply(x, group, dim % x.dim(), gradients)


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks' `x`, whose gradient every rank has: it passes through."""
    return _AllReduce.apply(x, group)


def replicate(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x`, which all ranks have, for uses that differ by rank: its gradient is summed over them."""
    return _Replicate.apply(x, group)


@dataclass(frozen=True)
class GradientGather:
    """How the gradient of a scattered sum is gathered.

    Attributes:
        writer: the quantizer.
        directions: in which it will be read.
    """

    writer: Writer
    directions: tuple[Direction, ...]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        writer: Writer,
        directions: tuple[Direction, ...],
        group: dist.ProcessGroup,
        cut: SequenceCut,
    ) -> QuantizedTensor:
        ctx.group, ctx.cut = group, cut
        return QuantizedTensor(_gathered(x, writer, directions, group, cut), cut.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _scattered_sum(grad, ctx.group, ctx.cut), None, None, None, None


class _GatherValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, cut: SequenceCut, gradient: str) -> Tensor:
        ctx.group, ctx.cut, ctx.gradient = group, cut, gradient
        return _whole_values(x, group, cut)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradient == "sum":
            return _scattered_sum(grad, ctx.group, ctx.cut), None, None, None
        own = ctx.cut.extents[dist.get_rank(ctx.group)]
        return grad.narrow(ctx.cut.dim, own.start, len(own)).contiguous(), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, gradients: GradientGather | None) -> Tensor:
        ctx.group, ctx.gradients = group, gradients
        ctx.cut = SequenceCut(tuple(x.shape), dim, dist.get_world_size(group))
        return _scattered_sum(x, group, ctx.cut)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        how = ctx.gradients
        if how is None:
            return _whole_values(grad, ctx.group, ctx.cut), None, None, None
        return (
            QuantizedTensor(_gathered(grad, how.writer, how.directions, ctx.group, ctx.cut), ctx.cut.shape),
            None,
            None,
            None,
        )


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return collectives.all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.all_reduce(grad, ctx.group), None


def _whole_values(x: Tensor, group: dist.ProcessGroup, cut: SequenceCut) -> Tensor:
    """The whole tensor in the dtype of `x`, this rank's part. No gradient."""
    widest = max(len(extent) for extent in cut.extents)
    rows = x.movedim(cut.dim, 0)
    padded = rows.new_zeros(widest, *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = collectives.all_gather(padded, group)
    if cut.shape[cut.dim] != len(gathered):
        parts = gathered.split(widest)
        gathered = torch.cat([part[: len(extent)] for part, extent in zip(parts, cut.extents, strict=True)])
    return gathered.movedim(0, cut.dim).contiguous()


def _gathered(
    x: Tensor, writer: Writer, directions: Sequence[Direction], group: dist.ProcessGroup, cut: SequenceCut
) -> QuantizedStorage:
    declared = writer.declare(x.dtype)
    format = declared.select(*(d for d in declared.directions if d in directions))
    cut.check(format)
    rank = dist.get_rank(group)
    if tuple(x.shape) != cut.local_shape(rank):
        raise ValueError(
            f"rank {rank} has a part of shape {tuple(x.shape)}; of {cut.shape}, cut along dimension {cut.dim} over "
            f"{cut.num_parts} ranks, it holds {cut.local_shape(rank)}: cut it as torch.chunk does"
        )
    return gather_rows(_quantized_runs(x, writer, format, group, cut), cut.runs, cut.region, group=group)


def _quantized_runs(
    x: Tensor, writer: Writer, format: Format, group: dist.ProcessGroup, cut: SequenceCut
) -> list[QuantizedStorage]:
    """This rank's runs, each with the bytes it has in the whole."""
    rank = dist.get_rank(group)
    runs = cut.runs[rank]
    if len(runs) > 1 and not cut.cuts_no_tile(format):
        storage: SpreadStorage = RunsStorage([_blank(x, format, run) for run in runs], cut.region, group)
        writer.write(x, storage)
        check_shared_scales(storage)
        return list(storage.runs)
    regions = [part for (part,) in cut.runs] if len(runs) == 1 else cut.side_by_side()
    storage = SpreadStorage(_blank(x, format, regions[rank]), Partition.of(regions), group)
    writer.write(x, storage)
    check_shared_scales(storage)
    if len(runs) == 1:
        return [storage.plain()]
    length = len(runs[0].rows)
    pieces = [storage.narrow(0, index * length, length) for index in range(len(runs))]
    return [QuantizedStorage(format, p.buffers, run, dtype=p.dtype) for p, run in zip(pieces, runs, strict=True)]


def _blank(x: Tensor, format: Format, region: Region) -> QuantizedStorage:
    return empty(format, region, dtype=x.dtype, device=x.device, fields=format.canonical.fields)


def _scattered_sum(x: Tensor, group: dist.ProcessGroup, cut: SequenceCut) -> Tensor:
    """This rank's part, along the cut, of the sum over ranks."""
    widest = max(len(extent) for extent in cut.extents)
    rows = x.movedim(cut.dim, 0)
    padded = rows.new_zeros(cut.num_parts, widest, *rows.shape[1:])
    for part, extent in zip(padded, cut.extents, strict=True):
        part[: len(extent)] = rows[extent.start : extent.stop]
    own = collectives.reduce_scatter(padded.flatten(0, 1), group)
    return own[: len(cut.extents[dist.get_rank(group)])].movedim(0, cut.dim).contiguous()


def _cut_of(x: Tensor, dim: int, size: int | None, group: dist.ProcessGroup) -> SequenceCut:
    return SequenceCut.of_local(tuple(x.shape), dim, num_parts=dist.get_world_size(group), size=size)
