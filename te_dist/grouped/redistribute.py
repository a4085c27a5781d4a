"""DTensor's `Shard(0)` to `Replicate()` of groups: bytes of whole members are gathered, nothing is dequantized."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.tensor  # noqa: F401  (defines the ops below)
from torch.distributed import ProcessGroup
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


def _whole(tensor: GroupedTensor, process: ProcessGroup) -> tuple[Group, int]:
    """The group that the ranks of `process` hold together, and the most members that one of them has.

    How many members each rank has is asked, since a part does not say over which dimension of a mesh it was cut: over
    the ranks that share experts, over those that FSDP2 shards them over, or over both.
    """
    own = tensor.storage
    mine = own.uniform.members
    spans = torch.tensor([[mine.start, len(mine)]], device=tensor.device)
    (start, *_), lengths = collectives.all_gather(spans, process).T.tolist()
    longest, total = max(lengths), sum(lengths)
    if lengths != [min(longest, max(total - rank * longest, 0)) for rank in range(len(lengths))]:
        raise ValueError(
            f"the ranks have {lengths} members of a group, wanted as many on each as on the first, until there are no "
            "more; cut the whole group over them"
        )
    return Group(Span(start, total), own.region), longest
