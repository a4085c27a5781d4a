"""Weights that a model had before others, quantized ones or shards, took their place: to train them trains nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary


class Exchange(NamedTuple):
    """What became of a weight.

    Attributes:
        name: of the weight in its model, or in a module that the text names.
        by: what put another there.
        old_gradient: the gradient that the weight had then, until another was added to it; None if there was none.
    """

    name: str
    by: str
    old_gradient: Any


_exchanges: Any = WeakTensorKeyDictionary()  # by weight, as long as it lives


def note_exchanged(weight: Any, name: str, by: str) -> None:
    """Says that a model has another weight of this name instead."""
    old: Any = weight.grad
    _exchanges[weight] = Exchange(name, by, None if old is None else TensorWeakRef(old))
    if old is not None and weight.requires_grad:
        weight.register_post_accumulate_grad_hook(_forget_old_gradient)


def exchange_of(weight: Tensor) -> Exchange | None:
    """What became of a weight, if anything."""
    return _exchanges.get(weight) if len(_exchanges) else None


def is_trained_elsewhere(weight: Tensor) -> bool:
    """Whether a weight that was exchanged has got a gradient since: of another model, which still has it."""
    old: Any = _exchanges[weight].old_gradient
    return weight.grad is not None and (old is None or weight.grad is not old())


def _forget_old_gradient(weight: Tensor) -> None:
    """Called by autograd, which adds to the gradient in place: the object alone does not tell."""
    # NOTE: the hook stays: FSDP2 goes through the hooks of a shard while it calls them.
    its: Exchange = _exchanges[weight]
    _exchanges[weight] = its._replace(old_gradient=None)
