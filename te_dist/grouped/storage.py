"""GroupedStorage: matrices quantized each on its own, with one buffer per field for all of them.

What moves bytes treats all members at once; what makes or reads values goes through the members, which are storages
whose buffers are views. Nothing is copied to see a group as members or members of one group as a group.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from te_dist.formats import (
    WHOLE,
    AnyGroup,
    Chunks,
    Direction,
    Field,
    Format,
    Group,
    Partition,
    Region,
    geometry,
    group_of,
)
from te_dist.formats.group import MEMBERS, ROWS
from te_dist.grouped.members import MemberView
from te_dist.ops.multi_tensor import Batch
from te_dist.ops.source import Source
from te_dist.scaling.agreement import PartsQuantization
from te_dist.tensor import Amaxes, QuantizedStorage, writes
from te_dist.tensor.storage import How

Values = Tensor | Sequence[Tensor]
_NO_DIMS: frozenset[int] = frozenset()


@dataclass(frozen=True)
class GroupCut:
    """What a part of a group was cut from: enough to say where every other part lies.

    Attributes:
        group: before the cut.
        dim: that was cut (0: whole members, 1: rows of every member).
        shape: nominal shape before the cut.
        of_part: whether that group was itself cut out of larger matrices (tensor parallelism).
    """

    group: Group
    dim: int
    shape: torch.Size
    of_part: bool = False

    @property
    def place(self) -> Group:
        """The group before the cut."""
        return self.group

    @property
    def is_of_several(self) -> bool:
        """Whether there is more than one index along what was cut."""
        return self.shape[self.dim] > 1

    def parts(self, num_shards: int) -> Chunks[Group]:
        """Every shard, in rank order."""
        return self.group.chunk(self.dim, num_shards)

    def leaves_all(self, shard: Group) -> bool:
        """Whether the cut was over one rank, so that `shard` is all there was."""
        return shard == self.group and self.is_of_several


class GroupedStorage(QuantizedStorage):
    """Quantized matrices of one format.

    Attributes:
        group: the members and their regions. Where these are equal, buffers are (members, outer, inner); else flat.
        cut: what this was cut from as a shard.
        others: as of `QuantizedStorage`; `unsettled` and `initial` hold the values of all members, (members, rows,
            cols) or, of members that differ, one behind the other.
    """

    matrix_dim: ClassVar[int] = 1  # whole members share nothing

    __slots__ = ("_members", "_prepared", "group")

    cut: GroupCut | None  # type: ignore[assignment]

    def __init__(
        self,
        format: Format,
        buffers: dict[str, Tensor],
        group: AnyGroup,
        *,
        dtype: torch.dtype,
        cut: GroupCut | None = None,
    ) -> None:
        region = group.region if isinstance(group, Group) else None
        super().__init__(format, buffers, region, dtype=dtype, cut=cut)  # type: ignore[arg-type]
        self.group = group
        self._members: tuple[dict[str, Tensor], tuple[QuantizedStorage, ...]] | None = None
        self._prepared: tuple[tuple[object, ...], _Together | None] = (), None

    def holding(self, buffers: dict[str, Tensor], format: Format | None = None) -> GroupedStorage:
        """A storage of the same members around other buffers, or of a part of their format; it has no history."""
        held = GroupedStorage(format or self.format, buffers, self.group, dtype=self.dtype, cut=self.cut)
        held.cut_dims = self.cut_dims
        return held

    # -- members ------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """(members, rows, cols); see `RaggedGroup.shape` where members differ."""
        return self.group.shape

    @property
    def place(self) -> AnyGroup:
        """The group."""
        return self.group

    def become(self, place: Any) -> None:
        """Uninitialised buffers (padding zero) of the same fields for another part of the whole."""
        self.buffers = {field.name: _allocate(field, place, self.device) for field in self.fields}
        self.group, self.region = place, place.region

    def uncut(self, shape: torch.Size) -> GroupCut:
        """The cut, along members, of a tensor of this nominal shape that has not been cut yet."""
        return GroupCut(self.uniform, MEMBERS, shape)

    @property
    def regions(self) -> tuple[Region, ...]:
        """Of each member."""
        return self.group.regions

    @property
    def members(self) -> tuple[QuantizedStorage, ...]:
        """Each matrix, as views of the buffers. What is written into one is written into the group.

        They take no note of it, as the group does (`unsettled`, `mastered`): use its `quantize_` to write all of them,
        or `view`.
        """
        if self._members is not None:
            buffers, members = self._members
            if buffers.keys() == self.buffers.keys() and all(buffers[name] is b for name, b in self.buffers.items()):
                return members
        views = {f.name: self.group.views(f, self.buffers[f.name]) for f in self.fields}
        members = tuple(
            QuantizedStorage(self.format, {n: v[i] for n, v in views.items()}, region, dtype=self.dtype)
            for i, region in enumerate(self.regions)
        )
        self._members = dict(self.buffers), members
        return members

    def view(self, index: int) -> MemberView:
        """One matrix for whoever may write into it alone: the group takes note of that."""
        return MemberView(self, range(len(self.regions))[index])

    def note_written(self, index: int, values: Tensor) -> None:
        """Takes note that one member was given these values, by whoever wrote them into the buffers.

        A master that had the values of all members has them again; so has what was kept at initialization, and what
        ranks are to agree on.
        """
        self.num_writes += 1
        if not isinstance(self.group, Group):  # of members that differ nothing is kept: they are no parameters
            self.initial, self.mastered, self.unsettled = None, 0, None
            return
        matrix = values.detach().reshape(self.group.region.shape)
        if self.unsettled is not None or self.may_share_scales():
            self.unsettled = self.dequantize(torch.float32) if self.unsettled is None else self.unsettled.clone()
            self.unsettled.view(self.shape)[index].copy_(matrix)
        if writes.master_of(self) is not None:
            writes.change_part(self, matrix, index)
            return
        captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self.mastered = 0
        if captured:
            self.initial = None
        if self.initial is not None:
            is_alone = writes.is_alone(sys.getrefcount(self.initial))
            if not is_alone:  # copies have the same, and optimizers know it by that
                self.initial = self.initial.clone()
            self.initial.view(self.shape)[index].copy_(matrix)

    @property
    def _member_cut_dims(self) -> frozenset[int]:
        """Dimensions (0: rows, 1: columns) along which members are cut."""
        return self.cut_dims | ({0} if self.cut is not None and self.cut.dim == ROWS else _NO_DIMS)

    def matrices(self, values: Tensor) -> list[tuple[QuantizedStorage, Tensor]]:
        """All members as one matrix where that is the same, and nobody else has a say in their scales."""
        whole = None if self.may_share_scales() else self._as_one_matrix()
        if whole is None or len(self.fields) > len(whole.fields):
            return super().matrices(values)
        return [(whole, values.detach().view(whole.shape))]

    def split(self, values: Values) -> list[Tensor]:
        """The matrix of each member out of what was given for all of them.

        Raises:
            ValueError: it does not fit the members.
        """
        sizes = [region.shape for region in self.regions]
        if isinstance(values, Tensor):
            if values.numel() != sum(map(math.prod, sizes)):
                raise ValueError(
                    f"got values of shape {tuple(values.shape)} for a group of shape {self.shape}; pass one tensor of "
                    "as many elements, or a list with one matrix for each member"
                )
            return self.views(values.detach())
        got = [tuple(each.shape) for each in values]
        if got != sizes:
            raise ValueError(f"got matrices of {got} for members of {sizes}; pass one for each, of its shape")
        return [each.detach() for each in values]

    def views(self, values: Tensor) -> list[Tensor]:
        """The matrix of each member, of values of all in their order; autograd goes on."""
        sizes = [region.shape for region in self.regions]
        parts = values.reshape(-1).split([math.prod(size) for size in sizes])
        return [part.view(size) for part, size in zip(parts, sizes, strict=True)]

    # -- directions ---------------------------------------------------------------------------------------------

    def derive(self, direction: Direction, out: Mapping[str, Tensor] | None = None) -> None:
        """As of a storage, for all members at once where their regions are equal."""
        if isinstance(self.group, Group):
            return super().derive(direction, out)
        out, members = out or {}, self.members
        missing = [f for f in self.format[direction].fields if f.name not in self.buffers or f.name in out]
        made = {f.name: out.get(f.name, _allocate(f, self.group, self.device)) for f in missing}
        views = {f.name: self.group.views(f, made[f.name]) for f in missing}
        for index, member in enumerate(members):
            member.derive(direction, {name: each[index] for name, each in views.items()})
        self.buffers = self.buffers | made

    def blank(
        self, format: Format, *, device: torch.device | str | None = None, fields: Iterable[Field] = ()
    ) -> GroupedStorage:
        """Uninitialised buffers for values such as these in `format`, or for some of its fields."""
        return empty(format, self.group, dtype=self.dtype, device=device or self.device, fields=fields)

    # -- values -------------------------------------------------------------------------------------------------

    def quantize_(self, x: Values | Source, amaxes: Sequence[Amaxes] | None = None) -> None:  # type: ignore[override]
        """Writes `x` into every direction that is present, each member by its own scales.

        Members of whole tiles are quantized as one matrix. Others on CUDA, where the same tensor was quantized into the
        same buffers before, by launches whose number does not depend on theirs; else one after the other.

        Args:
            x: as many values as all members have, in their order; or one matrix for each. fp32, bf16 or fp16.
            amaxes: of each member, by codec, the amax grids to use instead of those of its values.
        """
        if isinstance(x, Source):
            raise ValueError("a group is quantized from tensors; evaluate the source, or quantize member by member")
        matrices, members = self.split(x), self.members
        one = x if amaxes is None and isinstance(x, Tensor) else None
        whole = None if one is None else self._as_one_matrix()
        if one is not None and whole is not None:
            whole.quantize_(one)
            self._refresh_derived()
        elif amaxes is None and self._together_before(matrices):
            pass
        else:
            for index, (member, matrix) in enumerate(zip(members, matrices, strict=True)):
                member.quantize_(matrix, amaxes[index] if amaxes is not None else None)
        self.initial, self.mastered = None, 0
        self.num_writes += 1
        unsettled = amaxes is None and self.may_share_scales()
        self.unsettled = self._together(matrices, matrices[0].dtype).clone() if unsettled and matrices else None

    def _as_one_matrix(self) -> QuantizedStorage | None:
        """The canonical fields as those of one matrix of all rows, where that is the same: no tile crosses members.

        So a group is quantized like a matrix: in one pass, without a word about members.
        """
        group, fields = self.group, self.format.canonical.fields
        if not isinstance(group, Group) or not all(field.name in self.buffers for field in fields):
            return None
        rows, cols = group.region.shape
        codecs = (self.format[d].codec for d in self.format.canonical.directions)
        blocks = [f.tile[0] for f in fields] + [tile[0] for c in codecs for tile in c.amax_tiles]
        if any(b == WHOLE or rows % b for b in blocks) or any(group.region.phase(f.tile) != (0, 0) for f in fields):
            return None
        whole = Region.whole(len(group.members) * rows, cols)
        if any(f.order != "mk" or f.shape(group.region)[0] != f.compact_shape(group.region)[0] for f in fields):
            return None  # transposed, or with padding between members
        stacked = {f.name: self.buffers[f.name].flatten(0, 1) for f in fields}
        assert all(stacked[f.name].shape == f.shape(whole) for f in fields)
        return QuantizedStorage(self.format.canonical, stacked, whole, dtype=self.dtype)

    def _together_before(self, matrices: Sequence[Tensor]) -> bool:
        """Quantizes all members together, where that was prepared. It is when the same is asked for a second time.

        To prepare costs as much as a few rounds over the members, and keeps what was quantized.
        """
        if self.device.type != "cuda" or len(matrices) < 2 or not all(m.is_contiguous() for m in matrices):  # noqa: PLR2004
            return False
        places = (*(m.data_ptr() for m in matrices), *(b.data_ptr() for b in self.buffers.values()), matrices[0].dtype)
        before, prepared = self._prepared
        if before != places:
            self._prepared = places, None
            return False
        if prepared is None:
            if torch.cuda.is_current_stream_capturing():
                return False
            prepared = _Together(self.members, matrices)
            self._prepared = places, prepared
        prepared.run()
        return True

    def _refresh_derived(self) -> None:
        """Makes what is present and no canonical field anew."""
        derived = self.format.columnwise_is_derivable and Direction.COLUMNWISE in self.directions
        if derived:
            self._refresh(Direction.COLUMNWISE)

    def may_share_scales(self) -> bool:
        """Whether parts of a member may lie elsewhere that share a scale with the part here."""
        dims = self._member_cut_dims
        tiles = (tile for d in self.format.directions for tile in self.format[d].codec.amax_tiles)
        return any(tile[dim] != 1 for tile in tiles for dim in dims)

    def _decoded(self, how: How, dtype: torch.dtype | None, direction: Direction | None) -> Tensor:
        out = torch.empty(self.shape, dtype=dtype or self.dtype, device=self.device)
        whole = self._as_one_matrix()
        if whole is not None:
            wanted = None if self.format.columnwise_is_derivable else direction  # the same values in either
            whole.decode_into(out.flatten(0, 1), how, direction=wanted)
            return out
        for member, target in zip(self.members, self.split(out), strict=True):
            member.decode_into(target, how, direction=direction)
        return out

    def _together(self, matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Matrices of all members as one tensor of the shape of the group."""
        return torch.cat([matrix.to(dtype).reshape(-1) for matrix in matrices]).view(self.shape)

    # -- sharding -----------------------------------------------------------------------------------------------

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """Names of the fields that cross the wire: canonical; members of one rank have no scale of another's."""
        by_rows = self.cut is not None and self.cut.dim == ROWS
        return tuple(f.name for f in self.format.canonical.fields if not (by_rows and f.is_shared(0)))

    def narrow(self, dim: int, start: int, length: int) -> GroupedStorage:
        """A storage of its own for `length` members (dim 0), rows (1) or columns (2): canonical fields only."""
        group = self.uniform.narrow(dim, start, length)
        fields = self.format.sufficient(self.buffers)
        if dim == MEMBERS:
            buffers = {f.name: self.buffers[f.name].narrow(0, start, length).clone() for f in fields}
        else:
            buffers = {f.name: geometry.narrow(f, self.buffers[f.name], self.region, group.region) for f in fields}
        narrowed = GroupedStorage(self.format, buffers, group, dtype=self.dtype)
        narrowed.cut_dims = self.cut_dims | ({dim - 1} if dim != MEMBERS and group != self.group else _NO_DIMS)
        if self.initial is not None:
            narrowed.initial = self.initial.narrow(dim, start, length).clone()
        return narrowed

    @property
    def uniform(self) -> Group:
        """The group, whose members have one region.

        Raises:
            NotImplementedError: they have not.
        """
        if not isinstance(self.group, Group):
            raise NotImplementedError(
                "members of different shapes are not cut together; split the group into its members first"
            )
        return self.group

    def adopt(self, source: GroupedStorage) -> None:  # type: ignore[override]
        """Becomes a copy of `source`, of the same format, in place: every view of this storage sees it."""
        self.group = source.group
        super().adopt(source)

    def __getstate__(self) -> Any:
        """What is copied and pickled: not the views, which would be copies of what they are views of."""
        others, slots = super().__getstate__()  # type: ignore[misc]
        return others, slots | {"_members": None, "_prepared": ((), None)}

    def __repr__(self) -> str:
        present = "+".join(d.value for d in self.directions) or "empty"
        return f"GroupedStorage({describe(self.group)}, {present}: {', '.join(self.buffers)})"


def describe(group: AnyGroup) -> str:
    """ "8 members of 4096x7168"."""
    if isinstance(group, Group):
        return f"{len(group.members)} members of {'x'.join(map(str, group.region.shape))}"
    return f"{len(group.regions)} members of {', '.join('x'.join(map(str, r.shape)) for r in group.regions)}"


def empty(
    format: Format, group: AnyGroup, *, dtype: torch.dtype, device: torch.device | str, fields: Iterable[Field] = ()
) -> GroupedStorage:
    """Uninitialised buffers (padding zero) for `fields` of `format`; for all of them where none are named."""
    buffers = {f.name: _allocate(f, group, device) for f in tuple(fields) or format.fields}
    return GroupedStorage(format, buffers, group, dtype=dtype)


def quantize(x: Values, format: Format) -> GroupedStorage:
    """Quantizes each of several whole matrices.

    Args:
        x: (members, rows, cols), or a list of matrices of any shapes; fp32, bf16 or fp16.

    Raises:
        ValueError: there are no matrices, or the format cannot hold one of them.
    """
    if isinstance(x, Tensor) and x.dim() != 3:
        raise ValueError(f"got shape {tuple(x.shape)}, wanted (members, rows, cols), or a list of matrices")
    shapes = [tuple(matrix.shape) for matrix in x]
    if any(len(shape) != 2 for shape in shapes):  # noqa: PLR2004
        raise ValueError(f"got {shapes}, wanted a list of matrices, (rows, cols) each")
    group = Group.whole(*x.shape) if isinstance(x, Tensor) else group_of(shapes)  # type: ignore[arg-type]
    for region in dict.fromkeys(group.regions):
        for direction in format.directions:
            format[direction].codec.check(region)
    first = x if isinstance(x, Tensor) else x[0]
    storage = empty(format, group, dtype=first.dtype, device=first.device)
    storage.quantize_(x)
    return storage


def _allocate(field: Field, group: AnyGroup, device: torch.device | str) -> Tensor:
    padded = not isinstance(group, Group) or field.is_padded(group.region)
    return (torch.zeros if padded else torch.empty)(group.allocated(field), dtype=field.dtype, device=device)


class _Together:
    """Members of a group and the matrices they are quantized from, which stay where they are."""

    def __init__(self, members: Sequence[QuantizedStorage], matrices: Sequence[Tensor]) -> None:
        noop = torch.zeros(1, dtype=torch.int32, device=matrices[0].device)
        parts = [(m, matrix, Partition.of([m.region])) for m, matrix in zip(members, matrices, strict=True)]
        self._parts = PartsQuantization(parts, (), noop=noop)
        self._readers = Batch([[reader] for reader in self._parts.readers if reader is not None], noop)

    def run(self) -> None:
        """Quantizes all of them."""
        self._parts.begin()
        self._readers.run()
        self._parts.finish()
