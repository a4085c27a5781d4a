"""Storages of unsharded parameters: what FSDP2 gathered, and buffers of their own that it frees as well."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from te_dist.formats import Direction, Field, Format, Group, Region, geometry
from te_dist.fsdp2.plan import GatherPlan, Place
from te_dist.grouped import GroupedStorage
from te_dist.tensor import QuantizedStorage


def read_here(buffer: Tensor) -> Tensor:
    """`buffer` of a shard, kept until the current stream has read it.

    Under `CPUOffloadPolicy` a shard on the device is a copy made by the stream that feeds the gather; once the hooks
    are through it is freed, and that stream may write over it at once.
    """
    if buffer.is_cuda:
        buffer.record_stream(torch.cuda.current_stream(buffer.device))
    return buffer


class Unsharded(QuantizedStorage):
    """A storage that FSDP2 fills and frees.

    Attributes:
        owned: stored tensors by field name that are no views of gathered buffers; FSDP2 manages their memory.
        home: device of all buffers.
    """

    __slots__ = ()

    home: torch.device
    owned: dict[str, Tensor]

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
                self.buffers[field.name] = self._owned(field).copy_(read_here(shard[field.name]))
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
            return self._owned(field).copy_(read_here(shard[field.name]))
        whole = plan.concatenated(outputs, field)
        if whole is not None:
            return whole
        return plan.assemble(outputs, field, self._owned(field))

    def _owned(self, field: Field) -> Tensor:
        """The owned buffer of `field`, allocated."""
        buffer = self.owned.get(field.name)
        if buffer is None:
            leading = (len(self.place.members),) if isinstance(self.place, Group) else ()
            buffer = self.owned[field.name] = geometry.empty(field, self.region, device=self.home, leading=leading)
        storage = buffer.untyped_storage()
        if storage.size() != buffer.nbytes:
            storage.resize_(buffer.nbytes)
        return buffer


class UnshardedMatrix(Unsharded):
    """Of one matrix."""

    __slots__ = ("home", "owned")

    def __init__(self, format: Format, region: Region, *, dtype: torch.dtype, home: torch.device) -> None:
        super().__init__(format, {}, region, dtype=dtype)
        self.home, self.owned = home, {}


class UnshardedGroup(Unsharded, GroupedStorage):
    """Of all members of a group."""

    __slots__ = ("home", "owned")

    def __init__(self, format: Format, group: Group, *, dtype: torch.dtype, home: torch.device) -> None:
        GroupedStorage.__init__(self, format, {}, group, dtype=dtype)
        self.home, self.owned = home, {}


def unsharded(format: Format, place: Place, *, dtype: torch.dtype, home: torch.device) -> Unsharded:
    """Without any buffer yet."""
    kind = UnshardedGroup if isinstance(place, Group) else UnshardedMatrix
    return kind(format, place, dtype=dtype, home=home)  # type: ignore[arg-type]
