"""Storages of unsharded parameters: what FSDP2 gathered, and buffers of their own that it frees as well."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_dist.formats import Direction, Field, Format, Group, Region, geometry
from te_dist.fsdp2.plan import GatherPlan, Phase, Place
from te_dist.grouped import GroupedStorage
from te_dist.kernels.tape import Result, Tapes
from te_dist.tensor import QuantizedStorage
from te_dist.tensor.parts import note_reader


def read_here(buffer: Tensor) -> Tensor:
    """`buffer` of a shard, kept until the current stream has read it.

    Under `CPUOffloadPolicy` a shard on the device is a copy made by the stream that feeds the gather; once the hooks
    are through it is freed, and that stream may write over it at once.
    """
    if buffer.is_cuda:
        buffer.record_stream(torch.cuda.current_stream(buffer.device.index))
    return buffer


@dataclass
class _Way:
    """How a plan fills the buffers, found when it first does.

    Attributes:
        plan, outputs: what it is the way of.
        names: of all fields that are live.
        views: by name, fields whose stored tensors the gathered wires are.
        shared: names of fields that every rank has whole, in its shard.
        owned: the other fields that are live.
        beside: names of those that the shard has and no wire brought.
        tapes: of what is launched to fill them.
    """

    plan: GatherPlan
    outputs: tuple[Tensor, ...]
    names: list[str]
    views: dict[str, Tensor]
    shared: list[str]
    owned: list[Field]
    beside: list[str]
    tapes: Tapes

    def serves(self, plan: GatherPlan, outputs: tuple[Tensor, ...]) -> bool:
        """Whether this is the way of `plan` from the memory of `outputs`, which FSDP2 makes once, frees and fills."""
        same = plan is self.plan or plan == self.plan
        return same and len(outputs) == len(self.outputs) and all(map(Tensor.is_set_to, outputs, self.outputs))


class Unsharded(QuantizedStorage):
    """A storage that FSDP2 fills and frees.

    Attributes:
        owned: stored tensors by field name that are no views of gathered buffers; FSDP2 manages their memory.
        home: device of all buffers.
        ways: by phase, the latest one.
        read: names of the fields that are the shard's, as it was filled last.
        shard_dtype: nominal, of the shard when FSDP2 made its buffers.
    """

    __slots__ = ()

    home: torch.device
    owned: dict[str, Tensor]
    ways: dict[Phase, _Way]
    read: list[str]
    shard_dtype: torch.dtype | None

    @property
    def lasting_directions(self) -> tuple[Direction, ...]:
        """Without what backward alone gathers: where it runs forward again, that decides as it did before."""
        forward = self.ways.get(Phase.FORWARD)
        return self.directions if forward is None else tuple(d for d in self.directions if d in forward.plan.present)

    def allocate(self, fields: Iterable[Field]) -> None:
        """Makes the owned buffers of every field that any gather will need: FSDP2 is told of them once."""
        for field in fields:
            self._owned(field)

    def fill(self, plan: GatherPlan, outputs: tuple[Tensor, ...], shard: dict[str, Tensor]) -> None:
        """Takes over gathered wires; fields that were not sent are those of `shard`, by name."""
        way = self.ways.get(plan.phase)
        if way is None or not way.serves(plan, outputs):
            way = self.ways[plan.phase] = self._way(plan, outputs, shard)
        self.read = way.shared
        targets = {field.name: self._owned(field) for field in way.owned}
        found = way.views | {name: read_here(shard[name]) for name in way.shared} | targets
        self.buffers = {name: found[name] for name in way.names}
        if targets:
            beside = [read_here(shard[name]) for name in way.beside]
            way.tapes.run(None, (*outputs, *beside, *targets.values()), lambda: self._fill(way, outputs, shard))
        for name, buffer in self.owned.items():
            if name not in targets:
                buffer.untyped_storage().resize_(0)

    def note_dtype(self, shard: QuantizedStorage) -> None:
        """Raises, alike on all ranks, where the model has been converted since FSDP2 made its buffers."""
        self.shard_dtype = self.shard_dtype or shard.dtype
        if shard.dtype not in (self.shard_dtype, self.dtype):
            raise RuntimeError(
                f"this weight was converted from {self.shard_dtype} to {shard.dtype} after its first gather, and FSDP2 "
                "cannot make its buffers again, those of plain parameters beside it among them; convert the model "
                "before the first forward pass"
            )

    def note_as_reader(self, shard: QuantizedStorage) -> None:
        """Has `keep_read` called before the shard that this was filled from is written."""
        if self.read:
            note_reader(shard, self)

    def keep_read(self) -> None:
        """Before the shard is written: copies what is read there, unless FSDP2 has freed this."""
        others = (buffer for name, buffer in self.buffers.items() if name not in self.read)
        if all(buffer.untyped_storage().size() for buffer in others):
            self.buffers |= {name: self.buffers[name].clone() for name in self.read}

    def _way(self, plan: GatherPlan, outputs: tuple[Tensor, ...], shard: dict[str, Tensor]) -> _Way:
        live = {field for direction in plan.present for field in self.format[direction].fields}
        fields = [field for field in self.format.fields if field in live]
        views: dict[str, Tensor] = {}
        shared: list[str] = []
        beside: list[str] = []
        for field in fields:
            # NOTE: on a mesh of one rank FSDP2 gathers nothing and delivers a copy of the first wire only.
            is_here = plan.sends(field) and plan.wire_of(field) < len(outputs)
            whole = plan.concatenated(outputs, field) if is_here else None
            if whole is not None:
                views[field.name] = whole
            elif not plan.sends(field):
                shared.append(field.name)
            elif not is_here:
                beside.append(field.name)
        owned = [field for field in fields if field.name not in views and field.name not in shared]
        return _Way(plan, outputs, [field.name for field in fields], views, shared, owned, beside, Tapes())

    def _fill(self, way: _Way, outputs: tuple[Tensor, ...], shard: dict[str, Tensor]) -> Result:
        """Writes all buffers that are neither views nor the shard's."""
        for field in way.owned:
            target = self.owned[field.name]
            if field.name in way.beside:
                target.copy_(shard[field.name])
            else:
                way.plan.assemble(outputs, field, target)
        return (), None

    def __getstate__(self) -> Any:
        """What is copied and pickled: not the ways, which belong to the buffers of FSDP2."""
        others, slots = super().__getstate__()  # type: ignore[misc]
        return others, slots | {"ways": {}}

    def absent(self, direction: Direction) -> RuntimeError:
        """As for any storage; what FSDP2 gathers, the wrap decided."""
        return RuntimeError(
            f"the {direction.value} direction of this weight is needed, gathered for this pass is "
            f"{[d.value for d in self.directions]}: pass recompute=True to fsdp2.fully_shard where backward runs "
            "forward again; leave out unshard() between forward and backward, or pass reshard_after_forward=False"
        )

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

    __slots__ = ("home", "owned", "read", "shard_dtype", "ways")

    def __init__(self, format: Format, region: Region, *, dtype: torch.dtype, home: torch.device) -> None:
        super().__init__(format, {}, region, dtype=dtype)
        self.home, self.owned, self.ways, self.read, self.shard_dtype = home, {}, {}, [], None


class UnshardedGroup(Unsharded, GroupedStorage):
    """Of all members of a group."""

    __slots__ = ("home", "owned", "read", "shard_dtype", "ways")

    def __init__(self, format: Format, group: Group, *, dtype: torch.dtype, home: torch.device) -> None:
        GroupedStorage.__init__(self, format, {}, group, dtype=dtype)
        self.home, self.owned, self.ways, self.read, self.shard_dtype = home, {}, {}, [], None


def unsharded(format: Format, place: Place, *, dtype: torch.dtype, home: torch.device) -> Unsharded:
    """Without any buffer yet."""
    kind = UnshardedGroup if isinstance(place, Group) else UnshardedMatrix
    return kind(format, place, dtype=dtype, home=home)  # type: ignore[arg-type]
