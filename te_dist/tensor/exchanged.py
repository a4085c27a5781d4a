"""Weights that a model had before others, quantized ones or shards, took their place: to train them trains nothing."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class Exchange(NamedTuple):
    """What became of a weight.

    Attributes:
        name: of the weight in its model.
        by: the function that put another there.
    """

    name: str
    by: str


_exchanges = WeakTensorKeyDictionary()  # by weight, as long as it lives


def note_exchanged(weight: Tensor, name: str, by: str) -> None:
    """Says that a model has another weight of this name instead."""
    _exchanges[weight] = Exchange(name, by)


def exchange_of(weight: Tensor) -> Exchange | None:
    """What became of a weight, if anything."""
    return _exchanges.get(weight) if len(_exchanges) else None
