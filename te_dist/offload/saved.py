"""Saved tensors as what is parked of them: their buffers, and how to put them together again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from te_dist._torch_private import is_traceable_wrapper_subclass
from te_dist.offload.unit import Unit
from te_dist.tensor import QuantizedTensor

Rebuild = Callable[[Sequence[Tensor]], Tensor]

_STEPS = 8  # views of views that are followed back to a parameter
_MARKED: weakref.WeakSet[Any] = weakref.WeakSet()  # untyped storages that are never parked


class ParkedView:
    """One buffer of a saved tensor: a strided view into a parked unit."""

    __slots__ = ("_dtype", "_offset", "_size", "_stride", "unit")

    def __init__(self, unit: Unit, tensor: Tensor) -> None:
        self.unit = unit
        self._dtype, self._size, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()

    def restore(self) -> Tensor:
        """The buffer, on its device again."""
        storage, start = self.unit.fetch()
        out = torch.empty(0, dtype=self._dtype, device=storage.device)
        return out.set_(storage, self._offset - start // self._dtype.itemsize, self._size, self._stride)


def mark_not_offload(*tensors: Tensor) -> None:
    """Excludes tensors, and all that share their memory, from offloading: for what outlives backward anyway.

    Parameters and views of them are found without it. A frozen parameter of a DTensor read through `to_local()`, or a
    table that every layer saves, is not.
    """
    for tensor in tensors:
        for leaf in buffers_of(tensor):
            if leaf.layout == torch.strided:  # others are never parked
                _MARKED.add(leaf.untyped_storage())


def buffers_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that `tensor` is made of; itself, where it is one."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    return [leaf for inner in _inner(tensor).values() for leaf in buffers_of(inner)]


def take_apart(tensor: Tensor) -> tuple[list[Tensor], Rebuild]:
    """The buffers to park, and what makes an equal tensor of equal buffers. Neither holds on to `tensor`.

    A quantized tensor is parked as its canonical fields: a direction that can be derived is derived again.
    """
    if isinstance(tensor, QuantizedTensor):
        return _take_apart_quantized(tensor)
    wait = getattr(tensor, "trigger_wait", None)  # of torch's AsyncCollectiveTensor, which a collective still fills
    if wait is not None:
        return take_apart(wait())
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor], lambda leaves: leaves[0]
    names, context = tensor.__tensor_flatten__()
    kind, size, stride = type(tensor), tensor.shape, tensor.stride()
    apart = {name: take_apart(inner) for name, inner in _inner(tensor).items()}
    others = {name: getattr(tensor, name) for name in names if name not in apart}
    plan = [(name, len(leaves), put_together) for name, (leaves, put_together) in apart.items()]

    def rebuild(leaves: Sequence[Tensor]) -> Tensor:
        inner, at = dict(others), 0
        for name, length, put_together in plan:
            inner[name], at = put_together(leaves[at : at + length]), at + length
        return kind.__tensor_unflatten__(inner, context, size, stride)

    return [leaf for leaves, _ in apart.values() for leaf in leaves], rebuild


def _inner(tensor: Any) -> dict[str, Tensor]:
    """Inner tensors of a wrapper by name; what a wrapper names beside them (a mesh) is left out."""
    named = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    return {name: inner for name, inner in named.items() if isinstance(inner, Tensor)}


def _take_apart_quantized(tensor: QuantizedTensor) -> tuple[list[Tensor], Rebuild]:
    kind, shape, old = type(tensor), tensor.shape, tensor.storage
    present = old.directions
    leaves, shell = old.holding(dict(old.buffers)).prepare_for_saving()

    def rebuild(leaves: Sequence[Tensor]) -> Tensor:
        storage = shell.holding(dict(shell.buffers))
        storage.restore_from_saved(leaves)
        for direction in present:
            if direction not in storage.directions:
                storage.derive(direction)
        return kind(storage, shape)

    return leaves, rebuild


def outlives_backward(tensor: Tensor) -> bool:
    """Whether `tensor` is a parameter, a leaf of the graph, marked, or a view of one of these.

    A weight that FSDP2 can shard is told by its hooks, also where it is no `nn.Parameter` (a part of a DTensor).
    Parameters are marked as they are met, so that later views which nothing links to them are known by their memory.
    """
    base = tensor._base
    for known in (tensor,) if base is None else (tensor, base):
        if isinstance(known, nn.Parameter):
            mark_not_offload(known)
            return True
        if hasattr(known, "fsdp_pre_all_gather") or (known.requires_grad and known.is_leaf):
            return True
    buffers = buffers_of(tensor)
    if any(leaf.untyped_storage() in _MARKED for leaf in buffers):
        return True
    leaf = _leaf_behind(tensor) if base is not None or is_traceable_wrapper_subclass(tensor) else None
    if leaf is None:
        return False
    owned = {id(b.untyped_storage()) for b in buffers_of(leaf)}
    return any(id(b.untyped_storage()) in owned for b in buffers)


def _leaf_behind(tensor: Tensor) -> Tensor | None:
    """The leaf that `tensor` was made of alone, by a few ops of one input; None where there is no such leaf."""
    node = tensor.grad_fn
    for _ in range(_STEPS):
        inputs = [n for n, _ in node.next_functions if n is not None] if node is not None else []
        if len(inputs) != 1:
            return None
        (node,) = inputs
        leaf = getattr(node, "variable", None)  # what AccumulateGrad accumulates into
        if leaf is not None:
            return leaf
    return None
