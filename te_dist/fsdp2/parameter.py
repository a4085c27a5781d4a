"""The class of quantized parameters: a QuantizedTensor that FSDP2 shards and gathers.

[Note: Life of a sharded parameter]
`fully_shard` cuts the parameter into row shards (`aten.split`); each knows its region and what it was cut from. Before
a module runs, FSDP2 asks the shard for what to send (`fsdp_pre_all_gather`), gathers it, and hands the result back
(`fsdp_post_all_gather`). The first time this makes the unsharded parameter: its fields are views of the gathered
buffers where those already are the stored tensors, and *owned* buffers everywhere else (assembled, padded, derived).
All owned buffers are returned to FSDP2, which frees them with its own and allocates them again before the next
gather; from then on the hook fills them in place, so that whatever holds the unsharded parameter (autograd does) sees
the bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from te_dist import _torch_private
from te_dist.formats import Direction, Field, Format, Partition, Region, geometry
from te_dist.fsdp2.plan import KEPT, RECOMPUTED, RESHARDED, GatherPlan, GatherPolicy, Phase, plan_gather
from te_dist.scaling.agreement import quantize_parts
from te_dist.tensor import Cut, QuantizedStorage, QuantizedTensor


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

    def settled_policy(self) -> GatherPolicy:
        """The policy of this gather; raises, alike on all ranks, when the first one cannot serve the unit any more."""
        unit = self.unit()
        reshards = unit is not None and _torch_private.reshards_between_passes(unit)
        needed = (RECOMPUTED if self.recompute else RESHARDED) if reshards else KEPT
        if self.policy is None:
            self.policy = needed
        elif needed == KEPT != self.policy:
            raise RuntimeError(
                "this unit now keeps its parameters between passes, but its gather buffers were sized for one "
                "direction a pass at the first gather, and FSDP2 cannot size them again; call "
                "set_reshard_after_forward(False) or set_reshard_after_backward(False) before the first forward"
            )
        return self.policy


class UnshardedStorage(QuantizedStorage):
    """A storage that FSDP2 fills and frees.

    Attributes:
        owned: stored tensors by field name that are no views of gathered buffers; FSDP2 manages their memory.
        home: device of all buffers.
    """

    __slots__ = ("home", "owned")

    def __init__(self, format: Format, region: Region, *, dtype: torch.dtype, home: torch.device) -> None:
        super().__init__(format, {}, region, dtype=dtype)
        self.home = home
        self.owned: dict[str, Tensor] = {}

    def allocate(self, fields: Iterable[Field]) -> None:
        """Makes the owned buffers of every field that any gather will need: FSDP2 is told of them once."""
        for field in fields:
            self._owned(field)

    def fill(self, plan: GatherPlan, outputs: tuple[Tensor, ...], shard: dict[str, Tensor]) -> None:
        """Takes over gathered wires; fields that were not sent come from `shard`, by name, or are derived."""
        live = {f.name for d in plan.present for f in self.format[d].fields}
        self.buffers = {}
        for field in self.format.fields:
            if plan.sends(field):
                self.buffers[field.name] = self._gathered(field, plan, outputs, shard)
            elif field.name in live and field.name in shard and not self._is_derived(field):
                self.buffers[field.name] = self._owned(field).copy_(shard[field.name])
        if self.format.columnwise_is_derivable and Direction.COLUMNWISE in plan.present:
            targets = {f.name: self._owned(f) for f in self.format.columnwise.fields if self._is_derived(f)}
            self.derive(Direction.COLUMNWISE, targets)
        self.buffers = {name: buffer for name, buffer in self.buffers.items() if name in live}
        for name, buffer in self.owned.items():
            if name not in live:
                buffer.untyped_storage().resize_(0)

    def absent(self, direction: Direction) -> RuntimeError:
        """As for any storage; what FSDP2 gathers, the wrap decided."""
        return RuntimeError(
            f"the {direction.value} direction of this weight is needed, gathered for this pass is "
            f"{[d.value for d in self.directions]}: pass recompute=True to fsdp2.fully_shard where backward runs "
            "forward again; leave out unshard() between forward and backward, or pass reshard_after_forward=False"
        )

    def _is_derived(self, field: Field) -> bool:
        return self.format.columnwise_is_derivable and field not in self.format.rowwise.fields

    def _gathered(
        self, field: Field, plan: GatherPlan, outputs: tuple[Tensor, ...], shard: dict[str, Tensor]
    ) -> Tensor:
        # NOTE: on a mesh of one rank FSDP2 gathers nothing and delivers a copy of the first wire only.
        if plan.wire_of(field) >= len(outputs):
            return self._owned(field).copy_(shard[field.name])
        whole = plan.concatenated(outputs, field)
        if whole is not None:
            return whole
        return geometry.assemble(field, plan.unpack(outputs, field), plan.parts, self.region, self._owned(field))

    def _owned(self, field: Field) -> Tensor:
        """The owned buffer of `field`, allocated."""
        buffer = self.owned.get(field.name)
        if buffer is None:
            buffer = self.owned[field.name] = geometry.empty(field, self.region, device=self.home)
        storage = buffer.untyped_storage()
        if storage.size() != buffer.nbytes:
            storage.resize_(buffer.nbytes)
        return buffer


class QuantizedParameter(QuantizedTensor):
    """A quantized parameter, with the hooks by which FSDP2 gathers its bytes. See [Note: Life of a sharded parameter].

    Attributes:
        wrap: what `fsdp2.fully_shard` was told; None under plain `torch.distributed.fsdp.fully_shard`.
        keep_initial: whether initialization keeps the high-precision values (`get_high_precision_init_val`).
    """

    wrap: Wrap | None = None
    keep_initial: bool = False

    def like(self, storage: QuantizedStorage, shape: Any = None) -> QuantizedParameter:
        out = super().like(storage, shape)
        out.wrap, out.keep_initial = self.wrap, self.keep_initial
        return out

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: not the wrap, which belongs to the model that was sharded."""
        return {name: value for name, value in self.__dict__.items() if name != "wrap"}

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:
        """What this rank sends, and what the other hook needs to know."""
        # NOTE: the signature with the mesh alone is the one that allows shards of unequal size.
        storage = self.storage
        plans = self.gather_plans(mesh.size())
        phase = Phase.BACKWARD if _torch_private.in_backward() else Phase.FORWARD
        plan = plans[phase]
        if storage.unsettled is not None and self._cut.of_part:
            raise RuntimeError(
                "high-precision values were written into shards of a weight that tensor parallelism cuts as well; the "
                "ranks of one mesh dimension cannot settle its scales: call fsdp2.settle(model) after writing them"
            )
        if storage.unsettled is not None:
            quantize_parts([(storage, storage.unsettled, Partition.of(plan.parts))], [mesh.get_group()])
        return plan.pack(storage.buffers, storage.region), (plans, phase, storage.buffers, self._cut.shape)

    def gather_plans(self, num_ranks: int) -> dict[Phase, GatherPlan]:
        """What a mesh of `num_ranks` sends of this shard in each phase. The first call fixes the policy."""
        cut = self._cut
        parts = cut.parts(1 if _is_replicated(self.storage.region, cut) else num_ranks)
        policy = self.wrap.settled_policy() if self.wrap else GatherPolicy.unknown(self.format)
        return {p: plan_gather(self.format, parts, cut.region, policy=policy, phase=p) for p in Phase}

    @property
    def _cut(self) -> Cut:
        return self.storage.cut or Cut(self.storage.region, self.shape)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[QuantizedParameter, tuple[Tensor, ...]] | None:
        """The unsharded parameter and the buffers FSDP2 has to manage; later, `out` refilled in place."""
        plans, phase, shard, shape = metadata
        if len(plans[phase].parts) > 1 and outputs[0].numel() == plans[phase].wires[0].nbytes:
            plans = {p: replace(plan, parts=(plan.whole,)) for p, plan in plans.items()}  # one row, replicated
        plan = plans[phase]
        if out is None:
            with torch.inference_mode(False):  # what is made here serves training too
                storage = UnshardedStorage(self.format, plan.whole, dtype=param_dtype, home=outputs[0].device)
                owned = set().union(*(p.owned(self.format, len(outputs)) for p in plans.values()))
                storage.allocate(f for f in self.format.fields if f in owned)
                storage.fill(plan, outputs, shard)
                return QuantizedParameter(storage, shape), tuple(storage.owned.values())
        storage = getattr(out, "_local_tensor", out).storage  # `out` is a DTensor under tensor parallelism
        # Compiled code saves buffers for backward, not the tensor around them: they are gathered again, not changed.
        with _torch_private.preserved_versions(tuple(storage.owned.values())):
            storage.fill(plan, outputs, shard)
        return None

    def get_high_precision_init_val(self) -> Tensor | None:
        """The values (of this shard) that were quantized at initialization, if they were kept: CPU, nominal shape."""
        initial = self.storage.initial
        return None if initial is None else initial.view(self.shape)

    def clear_high_precision_init_val(self) -> None:
        """Frees what `get_high_precision_init_val` returns."""
        self.storage.initial = None


def _is_replicated(region: Region, cut: Cut) -> bool:
    """Whether every rank holds all rows: `replicate()`, or a mesh of one rank.

    A single row over several ranks looks the same on the rank that has it; what is sent is the same too.
    """
    return region == cut.region and cut.shape[0] > 1
