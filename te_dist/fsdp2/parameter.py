"""The classes of quantized parameters: tensors that FSDP2 shards and gathers.

[Note: Life of a sharded parameter]
`fully_shard` cuts the parameter into row shards (`aten.split`); each knows its region and what it was cut from. A group
is cut between members, or along the rows of each. Before
a module runs, FSDP2 asks the shard for what to send (`fsdp_pre_all_gather`), gathers it, and hands the result back
(`fsdp_post_all_gather`). The first time this makes the unsharded parameter: its fields are views of the gathered
buffers where those already are the stored tensors, the shard's own where every rank has them whole (the scale of a
tensor), and *owned* buffers everywhere else (assembled, padded). All owned buffers are returned to FSDP2, which frees
them with its own and allocates them again before the next gather; from then on the hook fills them in place, so that
whatever holds the unsharded parameter (autograd does) sees the bytes. What is a relayout of the rowwise direction is
not among them: the product that reads it lays it out.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from te_dist import _torch_private
from te_dist.formats import Partition
from te_dist.fsdp2.plan import (
    KEPT,
    RECOMPUTED,
    RESHARDED,
    GatherPlan,
    GatherPolicy,
    Phase,
    leading_and_region,
    plan_gather,
)
from te_dist.fsdp2.unsharded import read_here, unsharded
from te_dist.grouped import GroupCut, GroupedStorage, GroupedTensor
from te_dist.scaling.agreement import settle_parts
from te_dist.tensor import Cut, QuantizedStorage, QuantizedTensor, collectives
from te_dist.tensor.parts import note_reader
from te_dist.tensor.placement import local_tensor


@dataclass
class Wrap:
    """What the wrap said about a parameter, and what was decided at its first gather.

    Attributes:
        unit: the module that `fsdp2.fully_shard` wrapped.
        recompute: whether backward runs the forward pass again.
        policy: fixed at the first gather, because FSDP2 sizes its buffers then.
    """

    unit: weakref.ref[nn.Module]
    recompute: bool
    policy: GatherPolicy | None = None

    def needed_policy(self, *, inside: bool = False) -> GatherPolicy:
        """What the unit asks for as it is now; `inside`: whether it is known not to be the root."""
        unit = self.unit()
        reshards = unit is not None and _torch_private.reshards_between_passes(unit, inside=inside)
        return (RECOMPUTED if self.recompute else RESHARDED) if reshards else KEPT

    def settled_policy(self) -> GatherPolicy:
        """The policy of this gather; raises, alike on all ranks, when the first one cannot serve the unit any more."""
        needed = self.needed_policy()
        if self.policy is None:
            self.policy = needed
        elif needed == KEPT != self.policy:
            raise RuntimeError(
                "this unit now keeps its parameters between passes, but its gather buffers were sized for one "
                "direction a pass at the first gather, and FSDP2 cannot size them again; call "
                "set_reshard_after_forward(False) or set_reshard_after_backward(False) before the first forward "
                "(pipelines do the latter by themselves, but later)"
            )
        return self.policy


@dataclass(eq=False)
class Gathered:
    """What one hook of a gather tells the other. Until then the shard may be written: it reads what was there.

    Attributes:
        plans: of either phase.
        phase: when the gather began.
        shard: this rank's part.
        buffers: of the shard, as they were when the gather began.
        shape: nominal, of the whole.
        mesh: over which it is gathered.
    """

    plans: dict[Phase, GatherPlan]
    phase: Phase
    shard: QuantizedStorage
    buffers: dict[str, Tensor]
    shape: torch.Size
    mesh: DeviceMesh

    def keep_read(self) -> None:
        """Before the shard is written while the gather is under way."""
        self.buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}

    def for_this_pass(self, outputs: tuple[Tensor, ...]) -> GatherPlan:
        """The plan of what is in `outputs`; gathered again where it was prefetched in another phase than it serves.

        FSDP2 does so where a backward pass is not the last one (`set_is_last_backward(False)`): it then prefetches by
        an order that includes earlier microbatches, and leaves the result to the next forward pass.
        """
        plan, wanted = self.plans[self.phase], self.plans[Phase.now()]
        if wanted is plan or set(wanted.present) <= set(plan.present):
            return plan
        buffers = {name: read_here(buffer) for name, buffer in self.buffers.items()}
        wires = wanted.pack(buffers, self.shard.place)
        for output, wire in zip(outputs, wires, strict=False):
            if output.numel() == wire.numel():
                output.view(-1).copy_(wire)
            else:
                collectives.all_gather(wire, self.mesh.get_group(), out=output.view(-1))
        return wanted


class _Planned(NamedTuple):
    """The plans of a shard.

    Attributes:
        key: what they depend on.
        plans: by phase.
        sent: by phase, the memory of buffers and the wires that are parts of it.
    """

    key: Any
    plans: dict[Phase, GatherPlan]
    sent: dict[Phase, tuple[list[Tensor], tuple[Tensor, ...]]]


class _PreGather:
    """`fsdp_pre_all_gather` of a parameter. FSDP2 asks in every gather what it takes, which is said here once.

    The mesh alone: that is the signature that allows shards of unequal size.
    """

    __slots__ = ("_param",)
    __signature__ = inspect.Signature([inspect.Parameter("mesh", inspect.Parameter.POSITIONAL_OR_KEYWORD)])

    def __init__(self, param: ShardedParameter) -> None:
        self._param = param

    def __call__(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Gathered]:
        return self._param._sent(mesh)


class ShardedParameter(QuantizedTensor):
    """A quantized parameter, with the hooks by which FSDP2 gathers its bytes. See [Note: Life of a sharded parameter].

    Attributes:
        wrap: what `fsdp2.fully_shard` was told; None under plain `torch.distributed.fsdp.fully_shard`.
    """

    wrap: Wrap | None = None
    _planned: _Planned | None = None  # for the latest mesh

    @classmethod
    def around(cls, given: Any, shape: Sequence[int] | None, *, requires_grad: bool) -> Self:
        """As of any quantized tensor; a parameter, as `torch.nn.Parameter` makes of `given`."""
        made: Any = super().around(given, shape, requires_grad=False)
        if made.storage.cut is not None:
            made.wrap = getattr(given, "wrap", None)
        return nn.Parameter(made, requires_grad)  # type: ignore[return-value]

    def like(self, storage: QuantizedStorage, shape: Sequence[int] | None = None) -> Self:
        out = super().like(storage, shape)
        out.keep_initial = self.keep_initial
        if storage.cut is not None:  # put together again, it is no part of that unit
            out.wrap = self.wrap
        return out

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: not the wrap and the plans, which belong to the model that was sharded."""
        return {name: value for name, value in self.__dict__.items() if name not in ("wrap", "_planned")}

    @property
    def fsdp_pre_all_gather(self) -> _PreGather:
        """The hook that takes the mesh, and returns what this rank sends and what the other hook needs to know."""
        return _PreGather(self)

    def _sent(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Gathered]:
        storage = self.storage
        num_ranks = mesh.size()
        plans = self.gather_plans(num_ranks)
        phase = Phase.now()
        plan = plans[phase]
        if self.wrap is None and getattr(self._cut, "dim", 0) != 0:
            raise RuntimeError(
                "a group that is sharded along rows is gathered by te_dist.fsdp2.fully_shard only: torch's own lays "
                "bytes out as if they were values; use the former, or shard along members"
            )
        if storage.unsettled is not None and self._cut.of_part:
            raise RuntimeError(
                "high-precision values were written into shards of a weight that tensor parallelism cuts as well; the "
                "ranks of one mesh dimension cannot settle its scales: call fsdp2.settle(model) after writing them"
            )
        if storage.unsettled is not None:
            parts = Partition.of([leading_and_region(part)[1] for part in plan.parts])
            settle_parts([(storage, read_here(storage.unsettled), parts)], [mesh.get_group()])
        gathered = Gathered(plans, phase, storage, storage.buffers, self._cut.shape, mesh)
        if num_ranks > 1:  # on one rank FSDP2 takes what the shard holds at the end
            note_reader(storage, gathered)
        return self._wires(plan), gathered

    def _wires(self, plan: GatherPlan) -> tuple[Tensor, ...]:
        """What this shard sends; views of its buffers are made once."""
        buffers = self.storage.buffers
        sources = [buffers[wire.fields[0].name] for wire in plan.wires]
        planned = self._planned
        known = planned.sent.get(plan.phase) if planned is not None and planned.plans[plan.phase] is plan else None
        if known is not None and all(map(Tensor.is_set_to, sources, known[0])):
            return known[1]
        wires = plan.pack(buffers, self.storage.place)
        if planned is not None and plan.sends_views(buffers, self.storage.place):
            planned.sent[plan.phase] = [source.detach() for source in sources], wires
        return wires

    def gather_plans(self, num_ranks: int, policy: GatherPolicy | None = None) -> dict[Phase, GatherPlan]:
        """What a mesh of `num_ranks` sends of this shard in each phase.

        Args:
            policy: as if this were the one. None: that of the wrap, which the first such call fixes.
        """
        cut = self._cut
        if len(self.format.canonical.directions) == 1:
            policy = KEPT  # all send the same
        elif policy is None:
            policy = self.wrap.settled_policy() if self.wrap else KEPT
        key = (self.format, cut, self.storage.place, num_ranks, policy)
        if self._planned is not None and self._planned.key == key:
            return self._planned.plans
        # NOTE: one row over several ranks looks like `replicate()` on the rank that has it; what is sent is the same.
        is_replicated = self.storage.place == cut.place and cut.is_of_several
        parts = cut.parts(1 if is_replicated else num_ranks)
        plans = {p: plan_gather(self.format, parts, policy=policy, phase=p) for p in Phase}
        self._planned = _Planned(key, plans, {})
        return plans

    def expected_policy(self, *, inside: bool) -> GatherPolicy:
        """The policy by which this is gathered, or will be; `inside`: whether its unit is not the root."""
        if self.wrap is None:
            return KEPT
        return self.wrap.policy or self.wrap.needed_policy(inside=inside)

    @property
    def _cut(self) -> Cut | GroupCut:
        return self.storage.cut or self.storage.uncut(self.shape)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Gathered, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[ShardedParameter, tuple[Tensor, ...]] | None:
        """The unsharded parameter and the buffers FSDP2 has to manage; later, `out` refilled in place."""
        plans, shard, shape = metadata.plans, metadata.shard, metadata.shape
        plan = metadata.for_this_pass(outputs)
        if len(plan.parts) > 1 and outputs[0].numel() == plan.wires[0].nbytes:
            plans = {
                p: replace(plan, parts=replace(plan.parts, num_chunks=1)) for p, plan in plans.items()
            }  # one row, replicated
            plan = plans[plan.phase]
        if out is None:
            with torch.inference_mode(False):  # what is made here serves training too
                storage = unsharded(self.format, plan.whole, dtype=param_dtype, home=outputs[0].device)
                owned = set().union(*(p.owned(self.format, len(outputs)) for p in plans.values()))
                storage.allocate(f for f in self.format.fields if f in owned)
                storage.note_dtype(shard)
                storage.fill(plan, outputs, metadata.buffers)
                storage.note_as_reader(shard)
                return type(self)(storage, shape), tuple(storage.owned.values())
        storage = local_tensor(out).storage  # `out` is a DTensor under tensor parallelism
        storage.note_dtype(shard)
        # Compiled code saves buffers for backward, not the tensor around them: they are gathered again, not changed.
        with _torch_private.preserved_versions(tuple(storage.owned.values())):
            storage.fill(plan, outputs, metadata.buffers)
        storage.note_as_reader(shard)
        return None

    def get_high_precision_init_val(self) -> Tensor | None:
        """The values (of this shard) that were quantized at initialization, if they were kept: CPU, nominal shape."""
        initial = self.storage.initial
        return None if initial is None else initial.view(self.shape)

    def clear_high_precision_init_val(self) -> None:
        """Frees what `get_high_precision_init_val` returns."""
        self.storage.initial = None


class QuantizedParameter(ShardedParameter):
    """A matrix, cut along its rows."""


class GroupedParameter(ShardedParameter, GroupedTensor):
    """Matrices that are each quantized on their own, (members, rows, cols): the weights of experts.

    `fully_shard` cuts it between members (`Shard(0)`, which need not be as many on every rank), or along the rows of
    each (`shard_placement_fn=lambda param: Shard(1)`, for fewer members than ranks).
    """

    storage: GroupedStorage  # type: ignore[assignment]
