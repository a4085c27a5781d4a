"""Matrices that are stored together: one buffer per field for all members, each of which is a view into it.

Members are quantized each on its own: no tile and no scale crosses a border between two of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from te_dist.formats.field import Field
from te_dist.formats.region import Chunks, Region, Span, hashed_once

MEMBERS, ROWS, COLS = range(3)  # dimensions of a group
_BYTES_APART = 16  # members of a ragged group begin at multiples of this, as kernels read that much at a time


@hashed_once
@dataclass(frozen=True)
class Group:
    """Members of one region. A stored tensor has the extents (members, *`Field.shape`).

    Attributes:
        members: which of the whole group.
        region: of each member, in the matrix it was cut from.
    """

    members: Span
    region: Region

    @staticmethod
    def whole(num_members: int, m: int, k: int) -> Group:
        """Of matrices that were not cut."""
        return Group(Span(0, num_members), Region.whole(m, k))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(members, rows, cols)."""
        return len(self.members), *self.region.shape

    @property
    def regions(self) -> tuple[Region, ...]:
        """Of each member."""
        return (self.region,) * len(self.members)

    def allocated(self, field: Field) -> tuple[int, ...]:
        """Extents of the stored tensor of all members."""
        return len(self.members), *field.shape(self.region)

    def views(self, field: Field, buffer: Tensor) -> tuple[Tensor, ...]:
        """The stored tensor of each member."""
        return buffer.unbind()

    def narrow(self, dim: int, start: int, length: int) -> Group:
        """The part `start` to `start + length` along `dim` (0: members, 1: rows, 2: columns)."""
        if dim != MEMBERS:
            return Group(self.members, self.region.narrow(dim - 1, start, length))
        part = Span(self.members.start + start, length)
        if not self.members.contains(part):
            raise ValueError(f"cannot narrow members {self.members} to {part}: the part leaves the group")
        return Group(part, self.region)

    def chunk(self, dim: int, num_chunks: int) -> Chunks[Group]:
        """Parts as `torch.chunk` cuts `dim`, followed by empty ones up to `num_chunks`."""
        return Chunks(self, dim, num_chunks)


@hashed_once
@dataclass(frozen=True)
class RaggedGroup:
    """Members of any regions. A stored tensor is flat: members lie one behind the other, in whole words.

    Attributes:
        regions: of each member.
    """

    regions: tuple[Region, ...]

    def __post_init__(self) -> None:
        if not self.regions:
            raise ValueError("a ragged group has members, got none; Group.whole(0, m, k) is an empty group")

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """(rows of all members, cols) where these are equal, else (values of all members,)."""
        if len({len(region.cols) for region in self.regions}) == 1:
            return sum(len(region.rows) for region in self.regions), len(self.regions[0].cols)
        return (sum(math.prod(region.shape) for region in self.regions),)

    def allocated(self, field: Field) -> tuple[int, ...]:
        """Extents of the stored tensor of all members."""
        return (self._offsets(field)[-1],)

    def views(self, field: Field, buffer: Tensor) -> tuple[Tensor, ...]:
        """The stored tensor of each member."""
        shapes = [field.shape(region) for region in self.regions]
        offsets = self._offsets(field)
        return tuple(
            buffer[start : start + math.prod(shape)].view(shape) for start, shape in zip(offsets, shapes, strict=False)
        )

    def _offsets(self, field: Field) -> list[int]:
        """Element at which each member starts, and the end."""
        word = max(1, _BYTES_APART // field.dtype.itemsize)
        offsets = [0]
        for region in self.regions:
            offsets.append(offsets[-1] + -(-math.prod(field.shape(region)) // word) * word)
        return offsets


AnyGroup = Group | RaggedGroup


def group_of(shapes: Sequence[tuple[int, int]]) -> AnyGroup:
    """The group of whole matrices of these (rows, cols): uniform where they are equal.

    Raises:
        ValueError: there are none.
    """
    if not shapes:
        raise ValueError("a group has members, got no shapes; Group.whole(0, m, k) is an empty group")
    if len(set(shapes)) == 1:
        return Group.whole(len(shapes), *shapes[0])
    return RaggedGroup(tuple(Region.whole(*shape) for shape in shapes))
