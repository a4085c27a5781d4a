"""torch's collectives on flat tensors, under the names of whichever torch this is.

They write into tensors that were made for them, so torch's selective checkpointing must not leave them out when forward
runs again, see [Note: Ops under selective checkpointing].
"""

from __future__ import annotations

import atexit
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_dist import env
from te_dist.kernels.tape import communicate
from te_dist.tensor.untyped import CHECKPOINT

_WRITING = ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_", "allreduce_")  # ops behind these functions
DROPPED = 0.1  # seconds within which gloo's threads drop the tensors of a collective that has ended

if dist.is_available():
    CHECKPOINT.SAC_IGNORED_OPS.update(getattr(torch.ops.c10d, name).default for name in _WRITING)


def _first_of(*names: str) -> Any:
    """The collective under the first of `names` that this torch has."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


# torch 2.13 renames both; the older names warn there.
_all_gather = _first_of("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _first_of("reduce_scatter_single", "reduce_scatter_tensor")
_all_to_all = _first_of("all_to_all_single")
_all_reduce = _first_of("all_reduce")


def all_gather(x: Tensor, group: dist.ProcessGroup, *, out: Tensor | None = None) -> Tensor:
    """(world * n, ...): every rank's `x` (n, ...), contiguous and of equal shape, one after the other; into `out`."""
    if out is None:
        shape = dist.get_world_size(group) * x.shape[0], *x.shape[1:]
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    communicate(partial(_all_gather, group=group), out, x)
    return out


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(n, ...): this rank's of the equal parts of the sum over ranks of `x` (world * n, ...), contiguous."""
    out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    _reduce_scatter(out, x, group=group)
    return out


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(world * n, ...): of every rank's `x` (world * n, ...) the part that is this rank's, one after the other."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    communicate(partial(_all_to_all, group=group), out, x.contiguous())
    return out


def maximum_(x: Tensor, group: dist.ProcessGroup | None) -> None:
    """Replaces `x` by its maximum over the ranks of a group, None for the default one."""
    communicate(partial(_all_reduce, op=dist.ReduceOp.MAX, group=group), x)


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of `x`, in a new tensor."""
    out = x.contiguous().clone()
    _all_reduce(out, group=group)
    return out


@atexit.register
def _wait_for_dropped_tensors() -> None:
    """Leaves the GIL to gloo's threads before Python ends.

    They drop a collective's tensors some time after it has returned, which takes the GIL. A thread that asks for it
    while Python ends is unwound inside a destructor, and the process aborts ("terminate called without an active
    exception"). `destroy_process_group` joins the threads only where no mesh refers to the group any more.
    """
    if env.WORLD_SIZE.get() > 1 and dist.is_available() and dist.is_gloo_available():
        time.sleep(DROPPED)
