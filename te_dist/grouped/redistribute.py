"""DTensor's `Shard(0)` to `Replicate()` of groups: bytes of whole members are gathered, nothing is dequantized."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.tensor  # noqa: F401  (defines the ops below)
from torch.nn import functional

from te_dist._torch_private import process_group
from te_dist.formats import Group, Span
from te_dist.formats.group import MEMBERS
from te_dist.grouped.grouped_tensor import OPS, GroupedTensor
from te_dist.grouped.storage import GroupedStorage
from te_dist.tensor import OPS as OF_MATRICES
from te_dist.tensor import collectives
from te_dist.tensor.redistribute import WAITS

OPS.adopt(OF_MATRICES, torch.ops.aten.constant_pad_nd.default, *WAITS)
OPS.adopt(OF_MATRICES, torch.ops.c10d.scatter_.default, torch.ops.c10d.broadcast_.default)


@OPS.implements(torch.ops._c10d_functional.all_gather_into_tensor.default)
def _all_gather(func: Any, args: Any, kwargs: Any) -> GroupedTensor:
    """Members of all ranks, put together from their canonical bytes; members of padding stay in name only."""
    tensor, world, name = args
    process, own = process_group(name), tensor.storage
    if own.unsettled is not None or (own.cut is not None and own.cut.dim != MEMBERS):
        raise NotImplementedError(
            "rows of a group of quantized matrices are not gathered through DTensor: weights that are cut along rows "
            "are had whole from te_dist.checkpoints.save, or in high precision from export_safetensors"
        )
    whole, parts = _cut(own, process.rank(), world)
    storage = GroupedStorage(own.format, {}, whole, dtype=own.dtype)
    storage.cut_dims = own.cut_dims
    longest = max(len(part.members) for part in parts)
    for field in own.format.canonical.fields:
        bytes_of_members = own.buffers[field.name].contiguous().view(torch.uint8).flatten(1)
        sent = functional.pad(bytes_of_members, (0, 0, 0, longest - len(bytes_of_members)))
        # Parts are as long as the longest, but for the last ones: members lie in their order.
        gathered = collectives.all_gather(sent, process)[: len(whole.members)]
        storage.buffers[field.name] = gathered.view(field.dtype).view(whole.allocated(field))
    return tensor.like(storage, (world * tensor.shape[0], *tensor.shape[1:]))


def _cut(own: GroupedStorage, rank: int, world: int) -> tuple[Group, tuple[Group, ...]]:
    """The group that `world` ranks hold together, and that of every rank: as it was cut, else equal parts."""
    if own.cut is not None:
        whole, parts = own.cut.group, own.cut.parts(world)
    else:
        members, region = own.uniform.members, own.region
        whole = Group(Span(max(members.start - rank * len(members), 0), world * len(members)), region)
        parts = whole.chunk(MEMBERS, world)
    if len(parts[rank].members) != len(own.uniform.members) or parts[rank].region != own.region:
        raise ValueError(
            f"rank {rank} has {own.group} of a whole, no part {rank} of {world}, which is {parts[rank]}: it was cut "
            "over other ranks; cut the whole group over these"
        )
    return whole, parts
