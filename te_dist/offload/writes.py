"""How often tensors were written in place, known also where their memory is not held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_dist._torch_private import QuickDispatchMode, is_traceable_wrapper_subclass


class _Nothing(QuickDispatchMode):
    """Every op gives an empty tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        return torch.empty(0)


@dataclass(frozen=True)
class Writes:
    """How often a tensor had been written when it was saved.

    Attributes:
        shape: of the tensor.
        counter: a tensor that counts on, see `counter_of`.
        saved: the count.
    """

    shape: tuple[int, ...]
    counter: Tensor
    saved: int

    @classmethod
    def so_far(cls, tensor: Tensor, counter: Tensor) -> Writes:
        """Those into `tensor` until now."""
        return cls(tuple(tensor.shape), counter, version_of(tensor))

    def check(self) -> None:
        """Raises where there were more since, as autograd does where nothing is parked."""
        found = version_of(self.counter)
        if found != self.saved:
            raise RuntimeError(
                f"a tensor saved for backward, of shape {self.shape}, was modified in place since: it is at version "
                f"{found}, saved was {self.saved}; modify a clone of it"
            )


def version_of(tensor: Tensor) -> int:
    """How often `tensor` was written in place."""
    return 0 if tensor.is_inference() else tensor._version


def writes_around(tensor: Tensor) -> int:
    """How often what `tensor` is made of was written through it, which only a wrapper itself counts."""
    return version_of(tensor) if is_traceable_wrapper_subclass(tensor) else 0


def counter_of(tensor: Tensor) -> Tensor:
    """A tensor without memory whose version is that of `tensor` from here on: as a view of it, but of nothing."""
    with _Nothing():
        return tensor.detach()
