"""What a sharded model costs a rank, in bytes: computed from declarations, with nothing run.

`footprints` takes a model as it is wrapped, on the meta device too. What a rank gathers is counted as what arrives,
its own part included; what it reduces as what it brings. Over one rank nothing is sent. `fsdp2.count_traffic` counts
the same bytes where they are sent, `fsdp2.peak_bytes` says how many of them are allocated at once.

[Note: Kinds of ranks]
Ranks cut the same parameters in the same way. The bytes of one follow from where its part lies: tiles are anchored at
the first row and column of the whole, so that parts of equal extents may touch more or fewer of them. A part matters by
the extents of what is stored of it. What it was cut from last, by FSDP2, matters by all parts together, which are the
same wherever it begins at the same place in a tile. Which members of a group a rank has makes no difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from te_dist import _torch_private
from te_dist._torch_private import Managed
from te_dist.formats import Field, Format, Region, Span
from te_dist.formats.region import WHOLE
from te_dist.fsdp2.parameter import ShardedParameter
from te_dist.fsdp2.plan import GatherPlan, Phase, Place, leading_and_region
from te_dist.fsdp2.scratch import scratch_bytes
from te_dist.scaling.agreement import num_shared_amaxes
from te_dist.tensor import placement
from te_dist.tensor.placement import local_tensor
from te_dist.tensor.traffic import Purpose

_AMAX_BYTES = torch.float32.itemsize


@dataclass(frozen=True)
class Buffers:
    """Sizes of what one gather of a parameter allocates.

    Attributes:
        packed: of each wire that is sent; 0 where it is a part of the shard.
        cast: of what is sent of a plain parameter in another dtype; those of a unit share one buffer.
        gathered: of what arrives.
        staged: of what it is laid out in before, for shards of other dimensions than the first.
        owned: of fields that are no views of these, in the order in which they are allocated.
        unused: of those among them that this phase does without: freed when the others are filled.
        scratch: of temporary tensors while they are filled.
    """

    packed: tuple[int, ...] = ()
    cast: int = 0
    gathered: tuple[int, ...] = ()
    staged: tuple[int, ...] = ()
    owned: tuple[int, ...] = ()
    unused: tuple[int, ...] = ()
    scratch: int = 0


@dataclass(frozen=True)
class Footprint:
    """One parameter on one rank, in bytes.

    Attributes:
        name: as in `named_parameters`.
        shape: of the whole.
        dtype: nominal.
        format: of a quantized parameter; None for a plain one.
        part: shape of this rank's shard.
        codes, scales: of each field that is stored on this rank; a plain parameter is codes alone.
        sent: in one micro batch by passes, in one step by gradients and by the agreement on amaxes.
        group: number of the group of parameters of the unit that are gathered together.
        num_shards: ranks it is cut over.
        is_trained: whether it has a gradient.
        buffers: what a gather allocates in each phase.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    format: Format | None
    part: tuple[int, ...]
    codes: tuple[int, ...]
    scales: tuple[int, ...]
    sent: dict[Purpose, int]
    group: int = 0
    num_shards: int = 1
    is_trained: bool = True
    buffers: dict[Phase, Buffers] = field(default_factory=dict)

    @property
    def stored(self) -> tuple[int, ...]:
        """Bytes of all fields of the shard."""
        return self.codes + self.scales


@dataclass(frozen=True)
class Unit:
    """What `fully_shard` wrapped as one, and the units inside.

    Attributes:
        name: of the module; empty for the root.
        parameters: its own; those that it does not gather last.
        inner: units inside, in the order of their modules.
        is_root: whether it is a unit and in no other one.
        is_kept: whether its parameters stay gathered after forward.
        is_left_in_backward: whether backward does without its parameters.
        is_offloaded: whether its shards lie in host memory.
        ahead: names of units that it was told to gather ahead, in forward and in backward.
    """

    name: str
    parameters: tuple[Footprint, ...]
    inner: tuple[Unit, ...]
    is_root: bool = False
    is_kept: bool = False
    is_left_in_backward: bool = False
    is_offloaded: bool = False
    ahead: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def flat(self) -> Iterator[Unit]:
        """This unit and all inside."""
        yield self
        for unit in self.inner:
            yield from unit.flat()


def footprints(model: nn.Module) -> Unit:
    """The unit of `model`, with those inside of it and all parameters.

    Args:
        model: as `fully_shard` left it; its own parameters are in no unit, and stay whole, where it was not wrapped.
    """
    names = {module: name for name, module in model.named_modules()}
    return _unit(model, names, inside=False)


def kinds_of_ranks(model: nn.Module) -> Callable[[Mapping[str, int]], tuple[object, ...]]:
    """A function of a rank's coordinates along the axes of all meshes, by name: by what footprints may differ.

    Footprints of ranks for which it gives the same are equal. See [Note: Kinds of ranks].

    Args:
        model: as any of the ranks has it.
    """
    names = {module: name for name, module in model.named_modules()}
    cut = (param for _, param in parameters_between_steps(model, names) if isinstance(param, DTensor))
    alike = {(p.shape, p.placements, p.device_mesh, getattr(local_tensor(p), "format", None)): p for p in cut}
    return lambda coordinates: tuple(_share(param, coordinates) for param in alike.values())


def sent_per_step(of: Unit | Iterable[Footprint], *, micro_batches: int = 1) -> dict[Purpose, int]:
    """Bytes by purpose in a step whose gradients are reduced once, after the last of its micro batches.

    Args:
        of: a unit, with those inside; or some parameters.
        micro_batches: of a step.
    """
    total = dict.fromkeys(Purpose, 0)
    for each in (each for unit in of.flat() for each in unit.parameters) if isinstance(of, Unit) else of:
        for purpose, nbytes in each.sent.items():
            total[purpose] += nbytes * (micro_batches if purpose.is_of_a_pass else 1)
    return total


def _share(param: DTensor, coordinates: Mapping[str, int]) -> tuple[object, ...]:
    """The part of a parameter that a rank has, and what it was cut from, as far as bytes differ by them."""
    local, mesh = local_tensor(param), param.device_mesh
    fields = local.format.fields if isinstance(local, ShardedParameter) else ()
    first = local.storage.matrix_dim if fields else param.dim()  # dimension from which on tiles matter
    tile = math.lcm(*(extent for each in fields for extent in (*each.tile, *each.grain) if extent != WHOLE))
    spans, before = [Span(0, extent) for extent in param.shape], []
    for mesh_dim, dim in placement.cuts(param.placements):
        before.append(tuple((span.start % tile if i >= first else 0, len(span)) for i, span in enumerate(spans)))
        spans[dim] = _chunk(spans[dim], mesh.size(mesh_dim), coordinates[(mesh.mesh_dim_names or ())[mesh_dim]])
    extents = tuple(map(len, spans))
    if not fields:
        return *before, extents
    unit = math.prod(param.shape[first + 1 : -1])
    region = Region(Span(spans[first].start * unit, len(spans[first]) * unit), spans[-1])
    return *before, extents, *((each.shape(region), each.compact_shape(region)) for each in fields)


def _chunk(span: Span, num_chunks: int, index: int) -> Span:
    """The part that `torch.chunk` makes; an empty one behind the last."""
    size = -(-len(span) // num_chunks)
    start = min(size * index, len(span))
    return Span(span.start + start, min(size, len(span) - start))


def _unit(module: nn.Module, names: dict[nn.Module, str], *, inside: bool) -> Unit:
    is_unit = isinstance(module, FSDPModule)
    inner = tuple(_unit(each, names, inside=is_unit) for each in _inner_units(module))
    name = names[module]
    managed = _torch_private.managed_parameters(module, inside=inside) if is_unit else []
    managed = [each for each in managed if each.module in names]  # those wrapped together may lie outside
    parameters = [_footprint(each, dotted(names[each.module], each.name), inside=inside) for each in managed]
    taken = {each.name for unit in inner for found in unit.flat() for each in found.parameters}
    taken |= {each.name for each in parameters}
    parameters += [_unmanaged(n, p) for n, p in module.named_parameters(prefix=name) if n not in taken]
    if not is_unit:
        return Unit(name, tuple(parameters), inner)
    ahead = _torch_private.prefetched_units(module)
    forward, backward = (tuple(names[each] for each in units if each in names) for units in ahead)
    return Unit(
        name,
        tuple(parameters),
        inner,
        is_root=not inside,
        is_kept=any(each.is_kept for each in managed),
        is_left_in_backward=any(each.is_left_in_backward for each in managed),
        is_offloaded=any(each.is_offloaded for each in managed),
        ahead=(forward, backward),
    )


def _inner_units(module: nn.Module) -> Iterator[nn.Module]:
    """Outermost units inside of `module`; modules that were wrapped together count as the first of them."""
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _inner_units(child)
        elif _torch_private.is_first_of_unit(child):
            yield child


def outside_of_units(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`module`, and modules in it that are in no unit inside it, by name."""
    units = (m for m in module.modules() if m is not module and isinstance(m, FSDPModule))
    inner = {each for unit in units for each in unit.modules()}
    return ((name, each) for name, each in module.named_modules() if each not in inner)


def dotted(*names: str) -> str:
    """A name inside of named modules; the root has none."""
    return ".".join(filter(None, names))


def parameters_between_steps(model: nn.Module, names: Mapping[nn.Module, str]) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters by name, once each, as they are between steps: of units that are gathered the shards as well.

    Args:
        names: of all modules of `model`; those wrapped together with one of them may lie outside.
    """
    seen = set()
    for module in names:
        if isinstance(module, FSDPModule) and _torch_private.is_first_of_unit(module):
            for managed in _torch_private.managed_parameters(module):
                seen.add(managed.sharded)
                yield dotted(names.get(managed.module, ""), managed.name), managed.sharded
    yield from ((name, param) for name, param in model.named_parameters() if param not in seen)


def _unmanaged(name: str, param: nn.Parameter) -> Footprint:
    local = local_tensor(param)
    shape, part = tuple(param.shape), tuple(local.shape)
    if isinstance(local, ShardedParameter):
        return Footprint(name, shape, param.dtype, local.format, part, *_stored(local), sent={})
    return Footprint(name, shape, param.dtype, None, part, (local.nbytes,), (), sent={})


def _footprint(managed: Managed, name: str, *, inside: bool) -> Footprint:
    param, local = managed.sharded, local_tensor(managed.sharded)
    n, trained = managed.num_shards, param.requires_grad
    if isinstance(local, ShardedParameter):
        plans = local.gather_plans(n, local.expected_policy(inside=inside))
        gathered = {phase: plan.nbytes * n for phase, plan in plans.items()}
        buffers = {phase: _buffers(local, plans, phase, managed) for phase in Phase}
        stored = _stored(local)
    else:
        size = managed.padded_numel * managed.param_dtype.itemsize
        gathered = dict.fromkeys(Phase, size * n)
        cast = size if managed.param_dtype != param.dtype else 0
        staged = (size * n,) if managed.is_cut_inside else ()
        buffers = dict.fromkeys(Phase, Buffers(cast=cast, gathered=(size * n,), staged=staged))
        stored = ((managed.padded_numel * param.dtype.itemsize,), ())
    reduced = managed.padded_numel * n * managed.reduce_dtype.itemsize if trained else 0
    again = not (managed.is_kept or managed.is_left_in_backward)
    sent = {
        Purpose.FORWARD_GATHER: gathered[Phase.FORWARD] if n > 1 else 0,
        Purpose.BACKWARD_GATHER: gathered[Phase.BACKWARD] if n > 1 and again else 0,
        Purpose.REDUCE_SCATTER: reduced if n > 1 else 0,
        Purpose.ALL_REDUCE: reduced // n if managed.num_replicas > 1 else 0,
        Purpose.OPTIMIZER: _amaxes(param) if trained else 0,
    }
    return Footprint(
        name,
        tuple(param.shape),
        param.dtype,
        getattr(local, "format", None),
        tuple(local.shape),
        *stored,
        sent=sent,
        group=managed.group,
        num_shards=n,
        is_trained=trained,
        buffers=buffers,
    )


def _stored(local: ShardedParameter) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of the codes and of the scales that a shard holds, field by field."""
    sizes = {each: _field_bytes(each, local.storage.place) for each in local.storage.fields}
    codes = tuple(size for each, size in sizes.items() if each.grain == (1, 1))
    return codes, tuple(size for each, size in sizes.items() if each.grain != (1, 1))


def _field_bytes(of: Field, place: Place) -> int:
    leading, region = leading_and_region(place)
    return math.prod((*leading, *of.shape(region))) * of.dtype.itemsize


def _amaxes(param: nn.Parameter) -> int:
    """Bytes of amaxes that ranks agree on when every shard of a quantized parameter is quantized anew."""
    local = local_tensor(param)
    if not isinstance(local, ShardedParameter) or not isinstance(param, DTensor):
        return 0
    if not local.storage.may_share_scales():
        return 0
    num_matrices = math.prod(leading_and_region(local.storage.place)[0])
    times = sum(param.device_mesh.size(mesh_dim) > 1 for mesh_dim, _ in placement.matrix_cuts(param))
    return num_matrices * num_shared_amaxes(local.format, placement.partition(param)) * times * _AMAX_BYTES


def _buffers(local: ShardedParameter, plans: dict[Phase, GatherPlan], phase: Phase, managed: Managed) -> Buffers:
    """Of a quantized parameter. Over one rank FSDP2 delivers the first wire alone."""
    plan, whole = plans[phase], plans[phase].whole
    n = managed.num_shards
    gathered = tuple(wire.nbytes * n for wire in plan.wires[: len(plan.wires) if n > 1 else 1])
    owned = set().union(*(each.owned(local.format, len(gathered)) for each in plans.values()))
    live = {each for direction in plan.present for each in local.format[direction].fields}
    ordered = [each for each in local.format.fields if each in owned]
    return Buffers(
        packed=plan.packed(local.storage.place),
        gathered=gathered,
        staged=gathered if managed.is_cut_inside else (),
        owned=tuple(_field_bytes(each, whole) for each in ordered),
        unused=tuple(_field_bytes(each, whole) for each in ordered if each not in live),
        scratch=scratch_bytes(local.format, plan, local.storage.place, num_outputs=len(gathered)),
    )
