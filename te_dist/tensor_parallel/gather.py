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
from torch.autograd.function import once_differentiable

from te_dist.context import current_autocast
from te_dist.formats import Direction, Format, Partition
from te_dist.kernels.tape import Tapes
from te_dist.tensor import QuantizedStorage, QuantizedTensor, StorageKind, collectives
from te_dist.tensor_parallel.cuts import SequenceCut
from te_dist.tensor_parallel.spread import (
    FormatWriter,
    GatheredQuantizer,
    RunsStorage,
    SpreadStorage,
    Writer,
    blank_part,
    check_shared_scales,
)
from te_dist.tensor_parallel.wires import gather_rows

# NOTE: torch 2.11 leaves sums over ranks out of the graphs of gradients. What graphs hold is in `traced`.
outside_of_graphs = torch.compiler.disable(
    reason="this is none of a graph: what is gathered or summed outside of autocast, by delayed scaling, of DTensors, "
    "of lengths that are symbols, of parts that differ between ranks (in size, or in how a tile of scales is cut), or "
    "by hand. Give parallel layers such as graphs hold (docs/tensor_parallel.md), or leave out fullgraph=True"
)


@dataclass(frozen=True)
class Quantization:
    """How values are quantized before they are gathered.

    Attributes:
        writer: the quantizer.
        directions: those wanted, of the ones it has.
        scaled_by: ranks that keep scales of past steps in common, where the quantizer has such.
        role: of the writer in the linear map that it is of.
        tapes: of that map; None where gathers are not recorded.
        tensors: those that the writer holds.
    """

    writer: Writer
    directions: tuple[Direction, ...]
    scaled_by: dist.ProcessGroup | None = None
    role: str = ""
    tapes: Tapes | None = None
    tensors: tuple[Tensor, ...] = ()

    def format(self, dtype: torch.dtype) -> Format:
        """That of what is gathered of values of this type."""
        declared = self.writer.declare(dtype)
        return declared.select(*(direction for direction in declared.directions if direction in self.directions))

    @staticmethod
    def now(writer: Writer, directions: Sequence[Direction]) -> Quantization:
        """With the group of the surrounding `autocast`."""
        return Quantization(writer, tuple(directions), current_autocast().amax_reduction_group)

    @staticmethod
    def of(plan: Any, role: str, directions: Sequence[Direction], *, is_cut: bool) -> Quantization:
        """By the quantizer that the plan of a linear map has for a role, in what this rank has whole.

        `is_cut`: whether tensor parallelism cuts the map; other maps have tapes in common, which outlive a group.
        """
        writer = getattr(plan, role)
        writer = writer.inner if isinstance(writer, GatheredQuantizer) else writer
        tapes = plan.tapes if is_cut else None
        return Quantization(writer, tuple(directions), plan.scaled_by, role, tapes, plan.tensors)


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
    how = Quantization.now(FormatWriter(format), format.directions)
    return gather_by(how, x, group=group, cut=_cut_of(x, dim, size, group))


@outside_of_graphs
def gather_by(how: Quantization, x: Tensor, *, group: dist.ProcessGroup, cut: SequenceCut) -> QuantizedTensor:
    """`gather` by a quantizer."""
    return _Gather.apply(x, how, group, cut)


@outside_of_graphs
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
    values = _GatherValues.apply(x, group, _cut_of(x, dim, size, group), gradient)
    if gradient == "sum":
        _noted(values).summed_over = group
    return values


def sums_gradient(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether `x` was gathered over `group` by what sums its gradient, which nothing else is to sum.

    It is told by the memory, which views of it share and what is computed of it does not.
    """
    return isinstance(x, QuantizedTensor) or getattr(_noted(x), "summed_over", None) is group


def _noted(x: Tensor) -> Any:
    return x.untyped_storage()


@outside_of_graphs
def reduce_scatter(
    x: Tensor, group: dist.ProcessGroup, *, dim: int = 0, gradients: Quantization | None = None
) -> Tensor:
    """The sum of all ranks' `x`, cut along `dim` as `torch.chunk` cuts; each rank gets its part.

    Its gradient is gathered: quantized by `gradients`, in high precision without.
    """
    return _ReduceScatter.apply(x, group, dim % x.dim(), gradients)


@outside_of_graphs
def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks' `x`, whose gradient every rank has: it passes through."""
    return _AllReduce.apply(x, group)


@outside_of_graphs
def replicate(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x`, which all ranks have, for uses that differ by rank: its gradient is summed over them."""
    return _Replicate.apply(x, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Quantization, group: dist.ProcessGroup, cut: SequenceCut) -> QuantizedTensor:
        ctx.group, ctx.cut = group, cut
        return gathered(x, how, group, cut=cut)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return scattered_sum(grad, ctx.group, ctx.cut), None, None, None


class _GatherValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, cut: SequenceCut, gradient: str) -> Tensor:
        ctx.group, ctx.cut, ctx.gradient = group, cut, gradient
        return _whole_values(x, group, cut)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradient == "sum":
            return scattered_sum(grad, ctx.group, ctx.cut), None, None, None
        own = ctx.cut.extents[dist.get_rank(ctx.group)]
        return grad.narrow(ctx.cut.dim, own.start, len(own)).contiguous(), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, gradients: Quantization | None) -> Tensor:
        ctx.group, ctx.gradients = group, gradients
        ctx.cut = SequenceCut(tuple(x.shape), dim, dist.get_world_size(group))
        return scattered_sum(x, group, ctx.cut)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradients is None:
            return _whole_values(grad, ctx.group, ctx.cut), None, None, None
        return gathered(grad, ctx.gradients, ctx.group, cut=ctx.cut), None, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return collectives.all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return collectives.all_reduce(grad, ctx.group), None


def _whole_values(x: Tensor, group: dist.ProcessGroup, cut: SequenceCut) -> Tensor:
    """The whole tensor in the dtype of `x`, this rank's part. No gradient."""
    rows = _filled_up(x.movedim(cut.dim, 0), len(cut.extents[0]))
    return _along(cut, collectives.all_gather(rows, group)[: cut.shape[cut.dim]])


def gathered(x: Tensor, how: Quantization, group: dist.ProcessGroup, *, cut: SequenceCut) -> QuantizedTensor:
    """`gather_by` without autograd."""
    buffers, kind = gathered_buffers(x, how, group, cut=cut)
    return QuantizedTensor(kind.storage(buffers), cut.shape)


def gathered_buffers(
    x: Tensor, how: Quantization, group: dist.ProcessGroup, *, cut: SequenceCut
) -> tuple[tuple[Tensor, ...], StorageKind]:
    """Those of `gathered`, and what they are."""

    def found() -> tuple[tuple[Tensor, ...], StorageKind]:
        storage = _gathered_storage(x, how, group, cut)
        return tuple(storage.buffers.values()), StorageKind.of(storage)

    if how.tapes is None:
        return found()
    key = ("gathered", how.role, how.directions, how.scaled_by, group, cut)
    return how.tapes.run(key, (x, *how.tensors), found)


def _gathered_storage(x: Tensor, how: Quantization, group: dist.ProcessGroup, cut: SequenceCut) -> QuantizedStorage:
    format = how.format(x.dtype)
    cut.check(format)
    rank = dist.get_rank(group)
    if tuple(x.shape) != cut.local_shape(rank):
        raise ValueError(
            f"rank {rank} has a part of shape {tuple(x.shape)}; of {cut.shape}, cut along dimension {cut.dim} over "
            f"{cut.num_parts} ranks, it holds {cut.local_shape(rank)}: cut it as torch.chunk does"
        )
    storage = _spread_storage(x, format, group, cut)
    how.writer.write(x, storage)
    check_shared_scales(storage, how.scaled_by)
    runs = storage.cut_into(cut.runs[rank])
    return gather_rows(runs, cut.runs, cut.region, group=group)


def _spread_storage(x: Tensor, format: Format, group: dist.ProcessGroup, cut: SequenceCut) -> SpreadStorage:
    """What this rank's part is quantized into: one storage where tiles allow, else one for each run."""
    rank = dist.get_rank(group)
    runs = cut.runs[rank]
    if len(runs) > 1 and not cut.cuts_no_tile(format):
        return RunsStorage([blank_part(x, format, run) for run in runs], cut.region, group)
    regions = [part for (part,) in cut.runs] if len(runs) == 1 else cut.side_by_side()
    return SpreadStorage(blank_part(x, format, regions[rank]), Partition.of(regions), group)


def scattered_sum(x: Tensor, group: dist.ProcessGroup, cut: SequenceCut) -> Tensor:
    """This rank's part, along the cut, of the sum over ranks."""
    rows = _filled_up(x.movedim(cut.dim, 0), cut.num_parts * len(cut.extents[0]))
    return _along(cut, collectives.reduce_scatter(rows, group)[: len(cut.extents[dist.get_rank(group)])])


def _along(cut: SequenceCut, rows: Tensor) -> Tensor:
    """`rows` along the dimension that is cut; contiguous, and no view to autograd: it may be changed in place."""
    moved = rows.movedim(0, cut.dim)
    return torch.ops.aten._unsafe_view(rows, moved.shape) if moved.is_contiguous() else moved.contiguous()


def _filled_up(rows: Tensor, count: int) -> Tensor:
    """Contiguous, with rows of zeros at the end up to `count`; what `torch.chunk` cuts is short there alone."""
    if len(rows) == count:
        return rows.contiguous()
    filled = rows.new_zeros(count, *rows.shape[1:])
    filled[: len(rows)] = rows
    return filled


def _cut_of(x: Tensor, dim: int, size: int | None, group: dist.ProcessGroup) -> SequenceCut:
    return SequenceCut.of_local(tuple(x.shape), dim, num_parts=dist.get_world_size(group), size=size)
