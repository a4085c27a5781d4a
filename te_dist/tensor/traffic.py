"""Bytes that a block of code hands to collectives, as a rank sees it.

with Traffic() as traffic:
    loss = model(x)
assert traffic.nbytes("all_gather") == expected

`Traffic` sees every collective and not what it is for; who agrees on scales tells so by `report`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from te_dist._torch_private import TorchDispatchMode, tree_leaves

# By op of torch's collectives, the argument that holds what this rank hands over.
_INPUTS = {
    "c10d::_allgather_base_": 1,
    "c10d::_reduce_scatter_base_": 1,
    "c10d::allgather_": 1,
    "c10d::allgather_into_tensor_coalesced_": 1,
    "c10d::allreduce_": 0,
    "c10d::alltoall_": 1,
    "c10d::alltoall_base_": 1,
    "c10d::broadcast_": 0,
    "c10d::reduce_scatter_": 1,
    "c10d::reduce_scatter_tensor_coalesced_": 1,
    "_c10d_functional::all_gather_into_tensor": 0,
    "_c10d_functional::all_reduce": 0,
    "_c10d_functional::all_to_all_single": 0,
    "_c10d_functional::reduce_scatter_tensor": 0,
}
_NAMES = {"allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all"}


class Purpose(Enum):
    """What bytes of a parameter are sent for."""

    FORWARD_GATHER = "gather in forward"
    BACKWARD_GATHER = "gather in backward"
    REDUCE_SCATTER = "reduce-scatter of gradients"
    ALL_REDUCE = "all-reduce of gradients"  # over replicas
    AMAXES = "agreement on scales"  # of values that were written otherwise than by an optimizer, and of activations
    OPTIMIZER = "optimizer"  # agreement on scales in its step

    __hash__ = object.__hash__

    @property
    def is_of_a_pass(self) -> bool:
        """Whether every micro batch sends them."""
        return self in (Purpose.FORWARD_GATHER, Purpose.BACKWARD_GATHER)


Listener = Callable[[Any, int], None]  # takes whose amaxes they are (a storage, None where that has no name), bytes

_listeners: list[Listener] = []


def listen(listener: Listener) -> Callable[[], None]:
    """Has `listener` told of every agreement on amaxes; returns what ends that."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def report(shares: Callable[[], Iterable[tuple[Any, int]]]) -> None:
    """Tells of an agreement on amaxes: `shares` gives whose they are and bytes, and is asked if somebody listens."""
    if _listeners:
        for owner, nbytes in shares():
            for listener in _listeners:
                listener(owner, nbytes)


@dataclass(frozen=True)
class Sent:
    """One collective.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast".
        nbytes: what this rank handed to it.
        dtype: of that.
    """

    kind: str
    nbytes: int
    dtype: torch.dtype


class Traffic(TorchDispatchMode):
    """Records every collective of this thread inside of a block; backward passes on the CPU run in it too.

    Attributes:
        sent: in order.
    """

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.sent: list[Sent] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets tensors made of tensors run first, so that what they hand to collectives comes here."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        name = func.name().partition(".")[0]
        if name in _INPUTS:
            tensors: list[Tensor] = [t for t in tree_leaves(args[_INPUTS[name]]) if isinstance(t, Tensor)]
            self.sent.append(Sent(_kind(name), sum(t.nbytes for t in tensors), tensors[0].dtype))
        return func(*args, **(kwargs or {}))

    def nbytes(self, *kinds: str) -> int:
        """Bytes handed to collectives of these kinds; to all of them where none is named."""
        return sum(sent.nbytes for sent in self.sent if not kinds or sent.kind in kinds)


def _kind(name: str) -> str:
    bare = name.partition("::")[2].strip("_")
    for start, kind in (_NAMES | {"all_gather": "all_gather", "reduce_scatter": "reduce_scatter"}).items():
        if bare.startswith(start):
            return kind
    return bare
