"""DTensor's gather of groups, along members or along rows: bytes are gathered, nothing is dequantized."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.tensor  # noqa: F401  (defines the ops below)
from torch.distributed import ProcessGroup
from torch.nn import functional

from te_dist._torch_private import process_group
from te_dist.formats import Group, Span, geometry
from te_dist.formats.group import MEMBERS, ROWS
from te_dist.grouped.grouped_tensor import OPS, GroupedTensor
from te_dist.grouped.storage import GroupCut, GroupedStorage
from te_dist.tensor import OPS as OF_MATRICES
from te_dist.tensor import collectives
from te_dist.tensor.rectangles import check_equal, gathered_wires, note_in_parts, of_all, padded_in_name, regions
from te_dist.tensor.redistribute import WAITS

OPS.adopt(OF_MATRICES, *WAITS)
OPS.adopt(OF_MATRICES, torch.ops.c10d.scatter_.default, torch.ops.c10d.broadcast_.default)


@OPS.implements(torch.ops.aten.constant_pad_nd.default)
def _pad(func: Any, args: Any, kwargs: Any) -> GroupedTensor:
    """Members, or rows of each, behind those of a shard, by which DTensor makes all shards alike; in name only."""
    tensor, pad = args[:2]
    cut = tensor.storage.cut
    return padded_in_name(tensor, pad, dims=[] if cut is None else [cut.dim])


@OPS.implements(torch.ops._c10d_functional.all_gather_into_tensor.default)
def _all_gather(func: Any, args: Any, kwargs: Any) -> GroupedTensor:
    """Members, or rows, of all ranks, put together from their canonical bytes; what is padding stays in name only."""
    tensor, world, name = args
    process, own = process_group(name), tensor.storage
    if own.cut is not None and own.cut.dim != MEMBERS:
        return _rows_of_all(tensor, own.cut, process)
    whole, longest = _whole(tensor, process)
    storage = GroupedStorage(own.format, {}, whole, dtype=own.dtype)
    storage.cut_dims = own.cut_dims
    for field in own.format.canonical.fields:
        bytes_of_members = own.buffers[field.name].contiguous().view(torch.uint8).flatten(1)
        sent = functional.pad(bytes_of_members, (0, 0, 0, longest - len(bytes_of_members)))
        # Parts are as long as the longest, but for the last ones: members lie in their order.
        gathered = collectives.all_gather(sent, process)[: len(whole.members)]
        storage.buffers[field.name] = gathered.view(field.dtype).view(whole.allocated(field))
    return tensor.like(storage, (world * tensor.shape[0], *tensor.shape[1:]))


def _rows_of_all(tensor: GroupedTensor, cut: GroupCut, process: ProcessGroup) -> GroupedTensor:
    """Rows of every member, see [Note: What is gathered along another dimension]."""
    own, found = tensor.storage, regions(tensor.storage, process)
    whole, parts = cut.place, [part.region for part in cut.parts(process.size())]
    if found != parts:
        raise ValueError(
            f"the ranks have {found} of the members of a group, wanted {parts}: rows were cut over other ranks than "
            "these"
        )
    check_equal(parts, ROWS - 1)
    storage = GroupedStorage(own.format, {}, whole, dtype=own.dtype)
    storage.cut_dims = own.cut_dims - {ROWS - 1}
    for field in own.format.canonical.fields:
        wires = gathered_wires(field, own.buffers[field.name], parts, group=process)
        storage.buffers[field.name] = geometry.assemble(field, wires, parts, whole.region)
    note_in_parts(storage, len(parts))
    return tensor.like(storage, (len(parts) * tensor.shape[0], *tensor.shape[1:]))


def _whole(tensor: GroupedTensor, process: ProcessGroup) -> tuple[Group, int]:
    """The group that the ranks of `process` hold together, and the most members that one of them has.

    How many members each rank has is asked, since a part does not say over which dimension of a mesh it was cut: over
    the ranks that share experts, over those that FSDP2 shards them over, or over both.
    """
    own = tensor.storage
    mine = own.uniform.members
    (start, *_), lengths = zip(*of_all(own, (mine.start, len(mine)), process), strict=True)
    longest, total = max(lengths), sum(lengths)
    if list(lengths) != [min(longest, max(total - rank * longest, 0)) for rank in range(len(lengths))]:
        raise ValueError(
            f"the ranks have {list(lengths)} members of a group, wanted as many on each as on the first, until there "
            "are no more; cut the whole group over them"
        )
    return Group(Span(start, total), own.region), longest
