"""Which master the values of a quantized weight came from.

Writes from masters have numbers, which copies of a weight keep: no two processes have the same. And a weight knows the
master itself, so that an op that changes its values in place (clamps, decays them) changes those of the master too, and
not codes that are rounded.
"""

from __future__ import annotations

import itertools
import os
import uuid
import weakref
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from te_dist.tensor.storage import QuantizedStorage


class _Numbers:
    def __init__(self) -> None:
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        self.left = itertools.count(uuid.uuid4().int >> 64 | 1)


_numbers = _Numbers()
_masters: weakref.WeakKeyDictionary[QuantizedStorage, tuple[int, weakref.ref[Tensor]]] = weakref.WeakKeyDictionary()


def next_write() -> int:
    """Above 0."""
    return next(_numbers.left)


def note_master(storage: QuantizedStorage, master: Tensor) -> None:
    """Says that a storage has the values of `master`, high precision, this rank's part of it, since its last write."""
    _masters[storage] = storage.mastered, weakref.ref(master)


def master_of(storage: QuantizedStorage) -> Tensor | None:
    """The master whose values a storage has, if it is still there, beside it, and nothing else was written since."""
    write, found = _masters.get(storage, (0, None))
    master = found() if found is not None and write == storage.mastered != 0 else None
    return master if master is not None and master.device == storage.device else None
