"""The collectives of parallel layers in graphs of torch.compile.

[Note: Parallel layers in graphs]
A graph holds ops that do what `gather` and the sums do in eager mode, so that the bits are the same. Their tensors are
plain: what is gathered comes back as its buffers. A group is known by its name, as torch's functional collectives know
it, and how to quantize by the name of a plan. Ranks have to run them in one order, whatever a compiler makes of it: so
graphs are for parts that are alike on all ranks, also in how their scales lie, from which all compile the same. What is
cut otherwise, and lengths that are symbols, where something is gathered, run outside of graphs. So does `GatherInput`,
unless `fullgraph=True` says that all that takes what it gathered is in the same graph: what a graph gives back has its
gradient in its own type, and that of a quantized tensor is plain.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_static_value

from te_dist import _torch_private
from te_dist._torch_private import process_group
from te_dist.formats import Direction
from te_dist.ops._library import LIBRARY, define_writing
from te_dist.tensor import QuantizedTensor, StorageKind, collectives
from te_dist.tensor_parallel.cuts import SequenceCut
from te_dist.tensor_parallel.gather import Quantization, gathered_buffers, scattered_sum, sums_gradient
from te_dist.tensor_parallel.wires import sent_fields

_finders: list[Callable[[str], Any]] = []
_gatherings: dict[Any, _Known] = {}  # by how, and shape and type of a part
_MAX_GATHERINGS = 4096
_draws = count()  # calls in graphs that draw random numbers


class Gathering(NamedTuple):
    """How equal parts are gathered.

    Attributes:
        plan: name of that of a linear map.
        role: of what is gathered in it, whose quantizer writes.
        directions: whether the rowwise and the columnwise one are wanted.
        is_cut: whether tensor parallelism cuts the map.
        group: name of that of the ranks.
        dim: along which parts are put together.
    """

    plan: str
    role: str
    directions: tuple[bool, bool]
    is_cut: bool
    group: str
    dim: int


def find_plans_by(find: Callable[[str], Any]) -> None:
    """Says who finds the plan of a name that stands in a graph."""
    _finders[:] = [find]


@torch.compiler.allow_in_graph
def gather(x: Tensor, how: tuple[Any, ...]) -> Tensor:
    """`gather.gather_by`, as `Gathering` has it: a QuantizedTensor, whose gradient is summed."""
    return _Gather.apply(x, Gathering(*how))


@torch.compiler.allow_in_graph
def replicate(x: Tensor, group: str) -> Tensor:
    """`gather.replicate` over the group of this name."""
    return _Replicate.apply(x, group)


def refuse_summed(x: Tensor, group: str) -> None:
    """Has a graph raise where it is to sum the gradient of `x`, and what gathered `x` before does so."""
    torch.ops.te_dist.parallel_refuse_summed(x, group)


@torch.compiler.assume_constant_result
def is_one_graph() -> bool:
    """Whether a graph holds all uses of what is made in it, see [Note: Parallel layers in graphs]."""
    return _torch_private.is_one_graph()


def is_fixed(x: Tensor) -> bool:
    """Whether a graph that is traced is for this shape alone: `fullgraph=True` leaves nothing else to do."""
    is_static = all([has_static_value(extent) for extent in x.shape])  # noqa: C419  (compilers trace no generator)
    return is_static or is_one_graph()


def quantized(x: Tensor, how: Gathering) -> QuantizedTensor:
    """What all ranks' parts `x` are together, quantized; no autograd."""
    given = x, how.plan, how.role, list(how.directions), *how[3:]
    if _finders[0](how.plan).draws(how.role):
        buffers = torch.ops.te_dist.parallel_gather_drawing(*given, next(_draws))
    else:
        buffers = torch.ops.te_dist.parallel_gather(*given)
    known = _known(x, how)
    return QuantizedTensor(known.kind.storage(buffers), known.cut.shape)


def part_of_sum(x: Tensor, group: str, dim: int) -> Tensor:
    """This rank's of the equal parts of the sum of all ranks' `x`; no autograd."""
    return torch.ops.te_dist.parallel_reduce_scatter(x, group, dim)


def whole_sum(x: Tensor, group: str) -> Tensor:
    """The sum of all ranks' `x`; no autograd."""
    return torch.ops.te_dist.parallel_all_reduce(x, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Gathering) -> QuantizedTensor:
        ctx.how = how
        return quantized(x, how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return part_of_sum(grads[0], ctx.how.group, ctx.how.dim), None


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return whole_sum(grads[0], ctx.group), None


class _Known(NamedTuple):
    """What follows from how parts of one shape are gathered: by which plan, and what comes of it."""

    plan: Any
    quantization: Quantization
    cut: SequenceCut
    kind: StorageKind


def _known(x: Tensor, how: Gathering) -> _Known:
    """That of parts like `x`; worked out once for each plan."""
    plan, shape = _finders[0](how.plan), tuple(map(int, x.shape))
    place = how, shape, x.dtype
    found = _gatherings.get(place)
    if found is None or found.plan is not plan:
        wanted = [direction for direction, is_wanted in zip(Direction, how.directions, strict=True) if is_wanted]
        quantization = Quantization.of(plan, how.role, wanted, is_cut=how.is_cut)
        cut = SequenceCut.of_local(shape, how.dim, num_parts=dist.get_world_size(process_group(how.group)))
        format = quantization.format(x.dtype)
        shared = (field for field in format.canonical.fields if field.is_shared(0))
        names = tuple(field.name for field in (*sent_fields(format), *shared))
        found = _Known(plan, quantization, cut, StorageKind(format, names, cut.region, x.dtype))
        if len(_gatherings) >= _MAX_GATHERINGS:
            _gatherings.pop(next(iter(_gatherings)))
        _gatherings[place] = found
    return found


def _given(plan: str, role: str, directions: list[bool], *rest: Any) -> Gathering:
    """As an op is given it."""
    return Gathering(plan, role, (directions[0], directions[1]), *rest[:3])


def _gather(x: Tensor, *given: Any) -> list[Tensor]:
    how = _given(*given)
    _, quantization, cut, wanted = _known(x, how)
    buffers, kind = gathered_buffers(x, quantization, process_group(how.group), cut=cut)
    by_name = dict(zip(kind.names, buffers, strict=True))
    return [by_name[name] for name in wanted.names]


def _fake_gather(x: Tensor, *given: Any) -> list[Tensor]:
    kind = _known(x, _given(*given)).kind
    fields = {field.name: field for field in kind.format.canonical.fields}
    return [x.new_empty(fields[name].shape(kind.region), dtype=fields[name].dtype) for name in kind.names]


def _reduce_scatter(x: Tensor, group: str, dim: int) -> Tensor:
    over = process_group(group)
    return scattered_sum(x, over, SequenceCut(tuple(x.shape), dim % x.dim(), dist.get_world_size(over)))


def _fake_reduce_scatter(x: Tensor, group: str, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] //= dist.get_world_size(process_group(group))
    return x.new_empty(shape)


def _all_reduce(x: Tensor, group: str) -> Tensor:
    return collectives.all_reduce(x, process_group(group))


def _fake_all_reduce(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


def _refuse_summed(x: Tensor, group: str) -> None:
    if sums_gradient(x, process_group(group)):
        raise RuntimeError(
            "ColumnParallel: got in a graph what gather_values, or GatherInput outside of autocast, has made, whose "
            "gradient is summed over ranks already, wanted rows that every rank has; gather inside of the autocast of "
            "the layer, or leave it out of the graph: torch.compiler.disable"
        )


def _define() -> None:
    """Registers the ops."""
    how = "Tensor x, str plan, str role, bool[] directions, bool is_cut, str group, int dim"
    for schema, op, fake in (
        (f"parallel_gather({how}) -> Tensor[]", _gather, _fake_gather),
        # NOTE: by a number, since torch (2.13) makes one of equal calls, whatever tags they have.
        (f"parallel_gather_drawing({how}, int number) -> Tensor[]", _gather, _fake_gather),
        ("parallel_reduce_scatter(Tensor x, str group, int dim) -> Tensor", _reduce_scatter, _fake_reduce_scatter),
        ("parallel_all_reduce(Tensor x, str group) -> Tensor", _all_reduce, _fake_all_reduce),
        ("parallel_refuse_summed(Tensor x, str group) -> ()", _refuse_summed, lambda *_: None),
    ):
        name = schema.partition("(")[0]
        if schema.endswith("()"):
            define_writing(schema)
        else:
            LIBRARY.define(schema, tags=(torch.Tag.nondeterministic_seeded,) if name.endswith("_drawing") else ())
        LIBRARY.impl(name, op, "CPU")
        LIBRARY.impl(name, op, "CUDA")
        torch.library.register_fake(f"te_dist::{name}", fake, lib=LIBRARY)


_define()
torch.fx.has_side_effect(torch.ops.te_dist.parallel_refuse_summed.default)  # or compilers leave it out
