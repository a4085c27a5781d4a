"""DTensor's gather of groups, along members or along rows: bytes are gathered, nothing is dequantized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.tensor  # noqa: F401  (defines the ops below)
from torch.distributed import ProcessGroup
from torch.nn import functional

from te_dist._torch_private import process_group
from te_dist.formats import Group, Region, Span, geometry
from te_dist.formats.group import COLS, MEMBERS, ROWS
from te_dist.grouped.grouped_tensor import OPS, GroupedTensor
from te_dist.grouped.storage import GroupCut, GroupedStorage, empty
from te_dist.tensor import OPS as OF_MATRICES
from te_dist.tensor import collectives
from te_dist.tensor.rectangles import check_equal, gathered_wires, joined, note_in_parts, of_all, padded_in_name
from te_dist.tensor.redistribute import WAITS

OPS.adopt(OF_MATRICES, *WAITS)
OPS.adopt(OF_MATRICES, torch.ops.c10d.scatter_.default, torch.ops.c10d.broadcast_.default)


@OPS.implements(torch.ops.aten.constant_pad_nd.default)
def _pad(func: Any, args: Any, kwargs: Any) -> GroupedTensor:
    """Members, or rows of each, behind those of a shard, by which DTensor makes all shards alike; in name only."""
    tensor, pad = args[:2]
    own = tensor.storage
    dims = [1 + dim for dim in own.cut_dims]
    return padded_in_name(tensor, pad, dims=dims if own.cut is None else [own.cut.dim, *dims])


@OPS.implements(torch.ops._c10d_functional.all_gather_into_tensor.default)
def _all_gather(func: Any, args: Any, kwargs: Any) -> GroupedTensor:
    """Members, or rows, of all ranks, put together from their canonical bytes; what is padding stays in name only."""
    tensor, world, name = args
    process, own = process_group(name), tensor.storage
    places = _places(own, process)
    if _are_rows(own, places):
        return _rows_of_all(tensor, places, process)
    whole, longest = _whole(places)
    storage = GroupedStorage(own.format, {}, whole, dtype=own.dtype)
    storage.cut_dims = own.cut_dims
    storage.cut = _remaining_cut(own, ROWS, whole)
    for field in own.format.canonical.fields:
        bytes_of_members = own.buffers[field.name].contiguous().view(torch.uint8).flatten(1)
        sent = functional.pad(bytes_of_members, (0, 0, 0, longest - len(bytes_of_members)))
        # Parts are as long as the longest, but for the last ones: members lie in their order.
        gathered = collectives.all_gather(sent, process)[: len(whole.members)]
        storage.buffers[field.name] = gathered.view(field.dtype).view(whole.allocated(field))
    return tensor.like(storage, (world * tensor.shape[0], *tensor.shape[1:]))


def _places(own: GroupedStorage, process: ProcessGroup) -> list[Group]:
    """Of every rank's part. A part does not say over which dimension of a mesh it was cut how: over the ranks that
    share experts, over those that FSDP2 shards them over, or over both. Raises as `of_all`."""
    members, rows, cols = own.uniform.members, own.region.rows, own.region.cols
    spans = (members.start, len(members), rows.start, len(rows), cols.start, len(cols))
    everyones = of_all(own, spans, process)
    return [Group(Span(*each[:2]), Region(Span(*each[2:4]), Span(*each[4:]))) for each in everyones]


def _are_rows(own: GroupedStorage, places: Sequence[Group]) -> bool:
    """Whether the ranks have other rows each; a rank alone, whether it was cut along them."""
    if len(places) == 1:
        return own.cut is not None and own.cut.dim == ROWS
    return any(place.region.rows != places[0].region.rows for place in places)


def _rows_of_all(tensor: GroupedTensor, places: Sequence[Group], process: ProcessGroup) -> GroupedTensor:
    """Rows of every member, see [Note: What is gathered along another dimension]."""
    own, parts = tensor.storage, [place.region for place in places]
    if any(place.members != places[0].members for place in places):
        raise ValueError(
            f"the ranks have {list(places)} of a group, wanted rows of the same members, or other members alike: the "
            "group was cut over other ranks than these; gather one dimension of the mesh after the other"
        )
    whole = Group(own.uniform.members, joined(parts, ROWS - 1))
    check_equal(parts, ROWS - 1)
    if len(whole.members):
        storage = GroupedStorage(own.format, {}, whole, dtype=own.dtype)
        for field in own.format.canonical.fields:
            wires = gathered_wires(field, own.buffers[field.name], parts, group=process)
            storage.buffers[field.name] = geometry.assemble(field, wires, parts, whole.region)
    else:  # on none of these ranks
        fields = own.format.canonical.fields
        storage = empty(own.format, whole, dtype=own.dtype, device=own.device, fields=fields)
    storage.cut_dims = own.cut_dims - {ROWS - 1}
    storage.cut = _remaining_cut(own, MEMBERS, whole)
    note_in_parts(storage, len(parts))
    return tensor.like(storage, (len(parts) * tensor.shape[0], *tensor.shape[1:]))


def _remaining_cut(own: GroupedStorage, dim: int, place: Group) -> GroupCut | None:
    """How `place`, a part that was joined along the other dimension, is still cut along `dim`; None where it is not, or
    over one rank."""
    cut = own.cut
    if cut is None or cut.dim != dim or cut.leaves_all(own.uniform):
        return None
    before = Group(place.members, cut.group.region) if dim == ROWS else Group(cut.group.members, place.region)
    return GroupCut(before, dim, torch.Size(before.shape), cut.of_part)


def _whole(places: Sequence[Group]) -> tuple[Group, int]:
    """The group that the ranks hold together, and the most members that one of them has."""
    lengths = [len(place.members) for place in places]
    longest, total = max(lengths), sum(lengths)
    if lengths != [min(longest, max(total - rank * longest, 0)) for rank in range(len(lengths))]:
        raise ValueError(
            f"the ranks have {lengths} members of a group, wanted as many on each as on the first, until there "
            "are no more; cut the whole group over them"
        )
    check_equal([place.region for place in places], COLS - 1)  # DTensor takes parts along columns apart again
    first = places[0]
    return Group(Span(first.members.start, total), first.region), longest
