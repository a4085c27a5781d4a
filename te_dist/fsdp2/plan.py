"""What FSDP2 sends for a quantized parameter, and what the gathered parameter offers. Pure functions of declarations.

FSDP2 allocates its gather buffers once, from the first gather: the number, the size and the dtype of what a rank sends
must be the same in every phase. Two planes of a direction each may therefore share buffers only where their sizes are
equal; where they are not, both are packed into one buffer of the larger size.

[Note: Plans for groups]
A group is planned like a matrix, with all its members in front of what a field stores. Cut along rows, every rank holds
a part of each member, and values that cover all rows are on every rank already. Cut along members, every rank holds
some whole ones: nothing is shared, and what is gathered lies in the order of the members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import torch
from torch import Tensor

from te_dist import _torch_private, ops
from te_dist.formats import Chunks, Direction, Field, Format, Group, Region, geometry
from te_dist.formats.group import MEMBERS
from te_dist.ops.assemble import Chunking

_ALIGNMENT = 16  # bytes at which packed fields start, so that they can be viewed in their dtype

Place = Region | Group  # of a matrix, or of members of a group
Parts = Chunks[Region] | Chunks[Group]

ROW, COLUMN = (Direction.ROWWISE,), (Direction.COLUMNWISE,)
BOTH = tuple(Direction)


class Phase(Enum):
    """When a gather happens."""

    FORWARD = "forward"
    BACKWARD = "backward"  # recomputation of a forward pass included

    @staticmethod
    def now() -> Phase:
        """That of the pass this thread is in; outside of any, forward."""
        return Phase.BACKWARD if _torch_private.in_backward() else Phase.FORWARD


@dataclass(frozen=True)
class GatherPolicy:
    """Which GEMM directions the unsharded parameter serves after the gather of each phase.

    Attributes:
        forward, backward: the directions.
    """

    forward: tuple[Direction, ...] = BOTH
    backward: tuple[Direction, ...] = BOTH

    def directions(self, phase: Phase) -> tuple[Direction, ...]:
        return self.forward if phase is Phase.FORWARD else self.backward


KEPT = GatherPolicy()  # one gather serves both passes, and all that can be asked of it
RESHARDED = GatherPolicy(ROW, COLUMN)  # each pass gathers what it multiplies
RECOMPUTED = GatherPolicy(ROW, BOTH)  # backward runs forward again


@dataclass(frozen=True)
class Wire:
    """One buffer that every rank hands to FSDP2.

    Attributes:
        fields: what it holds, one after the other.
        offsets: byte at which each field starts.
        nbytes: its size on every rank: that of the largest shard.
    """

    fields: tuple[Field, ...]
    offsets: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class GatherPlan:
    """One gather of one parameter.

    Attributes:
        wires: the buffers sent.
        present: directions of the unsharded parameter afterwards.
        parts: place of every shard, in rank order.
        phase: when.
    """

    wires: tuple[Wire, ...]
    present: tuple[Direction, ...]
    parts: Parts
    phase: Phase

    @property
    def whole(self) -> Place:
        """Place that the parts were cut from."""
        return self.parts.whole

    @property
    def nbytes(self) -> int:
        """Bytes that each rank sends."""
        return sum(wire.nbytes for wire in self.wires)

    def pack(self, buffers: dict[str, Tensor], place: Place) -> tuple[Tensor, ...]:
        """Wires of a shard: 1-D uint8 tensors of the declared sizes, zero where a shard is smaller than the largest."""
        return tuple(_pack(wire, buffers, place) for wire in self.wires)

    def sends_views(self, buffers: dict[str, Tensor], place: Place) -> bool:
        """Whether all that `pack` returns are views of `buffers`."""
        _, region = leading_and_region(place)
        first = [wire.fields[0] for wire in self.wires]
        compact = [geometry.compact(field, buffers[field.name], region) for field in first]
        return all(map(_is_wire, compact, self.wires))

    def packed(self, place: Place) -> tuple[int, ...]:
        """Bytes that `pack` allocates for each wire of the shard at `place`: 0 where it is a part of the shard."""
        leading, region = leading_and_region(place)
        first = [wire.fields[0] for wire in self.wires]
        stored = [geometry.empty(field, region, device="meta", leading=leading) for field in first]
        compact = [geometry.compact(field, each, region) for field, each in zip(first, stored, strict=True)]
        return tuple(0 if _is_wire(each, wire) else wire.nbytes for each, wire in zip(compact, self.wires, strict=True))

    def wire_of(self, field: Field) -> int:
        """Index of the wire that carries `field`."""
        return next(i for i, wire in enumerate(self.wires) if field in wire.fields)

    def assemble(self, outputs: Sequence[Tensor], field: Field, out: Tensor) -> None:
        """Writes the stored tensor of `field` of the whole into `out`, from the gathered wires."""
        index, (_, region) = self.wire_of(field), leading_and_region(self.whole)
        wire = self.wires[index]
        gathered = outputs[index].view(len(self.parts), wire.nbytes)[:, wire.offsets[wire.fields.index(field)] :]
        if field.is_padded(region):
            out.zero_()
        chunking, dim = _chunking(field, self.parts)
        ops.assemble_chunks(gathered, chunking, dim=dim, out=geometry.compact(field, out, region))

    def concatenated(self, outputs: Sequence[Tensor], field: Field) -> Tensor | None:
        """The stored tensor of `field`, where the gathered wire already is it (a view); None where it is not."""
        return _view(field, outputs[self.wire_of(field)], self.whole) if self.is_zero_copy(field) else None

    def is_zero_copy(self, field: Field) -> bool:
        """Whether the gathered wire of `field` is its stored tensor."""
        wire = self.wires[self.wire_of(field)]
        fills = wire.fields == (field,) and wire.nbytes == _widest(field, self.parts)
        return fills and _is_concatenation(field, self.parts)

    def sends(self, field: Field) -> bool:
        """Whether `field` crosses the wire."""
        return any(field in wire.fields for wire in self.wires)

    def owned(self, format: Format, num_outputs: int) -> set[Field]:
        """Fields of the unsharded parameter that are neither views of `num_outputs` gathered wires nor the shard's."""
        sent = {f for d in self.present for f in format[d].fields if self.sends(f)}
        return sent - {f for f in sent if self.wire_of(f) < num_outputs and self.is_zero_copy(f)}


@lru_cache(maxsize=8192)
def plan_gather(format: Format, parts: Parts, *, policy: GatherPolicy, phase: Phase) -> GatherPlan:
    """The fewest bytes that serve `policy`, under FSDP2's fixed buffers. See [Note: Plans for groups].

    Of a derivable format the rowwise direction is there in every pass, whatever the policy: who multiplies the other
    one lays it out for the time of the product.
    """
    shares = not _is_cut_by_members(parts)
    sent = {p: _sent_fields(format, policy.directions(p), shares=shares) for p in Phase}
    sizes = {p: [_widest(f, parts) for f in sent[p]] for p in Phase}
    if sizes[Phase.FORWARD] == sizes[Phase.BACKWARD]:
        wires = tuple(Wire((f,), (0,), n) for f, n in zip(sent[phase], sizes[phase], strict=True))
    else:
        layouts = {p: _layout(sizes[p]) for p in Phase}
        offsets, _ = layouts[phase]
        wires = (Wire(sent[phase], offsets, max(total for _, total in layouts.values())),)
    return GatherPlan(wires, _gathered_part(format, policy.directions(phase)).directions, parts, phase)


def _gathered_part(format: Format, needed: Sequence[Direction]) -> Format:
    """Of `format` the part of which the directions `needed` can be had."""
    part = format.canonical
    return part.select(*(tuple(d for d in needed if d in part) or part.directions))


def _sent_fields(format: Format, needed: Sequence[Direction], *, shares: bool) -> tuple[Field, ...]:
    """Fields that must cross the wire so that `needed` can be served; shared ones are on every rank already."""
    return tuple(f for f in _gathered_part(format, needed).fields if not (shares and f.is_shared(0)))


def leading_and_region(place: Place) -> tuple[tuple[int, ...], Region]:
    """Dimensions in front of a stored tensor, and the region of a matrix."""
    return ((len(place.members),), place.region) if isinstance(place, Group) else ((), place)


def _is_cut_by_members(parts: Parts) -> bool:
    return isinstance(parts.whole, Group) and parts.dim == MEMBERS


@lru_cache(maxsize=1024)
def _is_concatenation(field: Field, parts: Parts) -> bool:
    """Whether wires of the length of the longest begin with the stored tensor of the whole."""
    if isinstance(parts.whole, Region):
        return geometry.is_concatenation(field, parts, parts.whole)  # type: ignore[arg-type]
    # Chunks of members: all are as long as the first, but for the last ones.
    return _is_cut_by_members(parts) and not field.is_padded(parts.whole.region)


@lru_cache(maxsize=1024)
def _chunking(field: Field, parts: Parts) -> tuple[Chunking, int]:
    """How the stored values of `field` were cut, and along which dimension of their tensor.

    Raises:
        ValueError: inside of a stored byte.
    """
    leading, region = leading_and_region(parts.whole)
    if _is_cut_by_members(parts):
        return Chunking(0, parts.extent, parts.length, 1), 0
    geometry.extent(field, region, leading_and_region(parts[0])[1])
    grain = field.grain[0]
    step = grain * field.pack if field.inner_dim == 0 else grain
    outer, inner = len(leading), len(leading) + 1
    chunking = Chunking(region.rows.start % grain, parts.extent, parts.length, step)
    return chunking, inner if field.inner_dim == 0 else outer


def _bytes(field: Field, place: Place) -> int:
    leading, region = leading_and_region(place)
    return math.prod(leading) * field.compact_bytes(region)


@lru_cache(maxsize=1024)
def _widest(field: Field, parts: Parts) -> int:
    return max(_bytes(field, part) for part in parts)


def _layout(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
    return tuple(offsets), total


def _pack(wire: Wire, buffers: dict[str, Tensor], place: Place) -> Tensor:
    _, region = leading_and_region(place)
    stored = geometry.compact(wire.fields[0], buffers[wire.fields[0].name], region)
    if _is_wire(stored, wire):
        return stored.reshape(-1).view(torch.uint8)
    device = buffers[wire.fields[0].name].device
    packed = torch.zeros(wire.nbytes, dtype=torch.uint8, device=device)
    for field, start in zip(wire.fields, wire.offsets, strict=True):
        _view(field, packed[start:], place).copy_(geometry.compact(field, buffers[field.name], region))
    return packed


def _is_wire(stored: Tensor, wire: Wire) -> bool:
    """Whether the compact tensor of the first field of `wire` is all of it."""
    return len(wire.fields) == 1 and stored.is_contiguous() and stored.nbytes == wire.nbytes


def _view(field: Field, flat: Tensor, place: Place) -> Tensor:
    """The first bytes of `flat` (1-D uint8) as the compact tensor of `field`."""
    leading, region = leading_and_region(place)
    return flat[: _bytes(field, place)].view(field.dtype).view(*leading, *field.compact_shape(region))
