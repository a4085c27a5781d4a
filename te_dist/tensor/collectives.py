"""torch's collectives on flat tensors, under the names of whichever torch this is."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renames both; the older names warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(world * n, ...): every rank's `x` (n, ...), contiguous and of equal shape, one after the other."""
    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    _all_gather(out, x, group=group)
    return out


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(n, ...): this rank's of the equal parts of the sum over ranks of `x` (world * n, ...), contiguous."""
    out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    _reduce_scatter(out, x, group=group)
    return out


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of `x`, in a new tensor."""
    out = x.contiguous().clone()
    dist.all_reduce(out, group=group)
    return out
