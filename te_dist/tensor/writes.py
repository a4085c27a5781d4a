"""Which master the values of a quantized weight came from.

Writes from masters have numbers, which copies of a weight keep: no two processes have the same. And a weight knows the
master itself, so that an op that changes its values in place (clamps, decays them) changes those of the master too, and
not codes that are rounded. What the master had before is kept as long as a copy of the weight is there, which may be
put back.

[Note: Masters that are loaded]
A master that an optimizer loads is proposed for its weight, which may be loaded before or after. When values of the
weight are first changed in place, the master becomes the weight's if each value is one of its own, rounded, and is
changed too; if not, the weight goes its own way. Values that are copied into a weight decide nothing: they may be what
is loaded.
"""

from __future__ import annotations

import itertools
import os
import sys
import uuid
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_dist.tensor.untyped import TENSOR

if TYPE_CHECKING:
    from te_dist.tensor.storage import QuantizedStorage


class _Numbers:
    def __init__(self) -> None:
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        self.left = itertools.count(uuid.uuid4().int >> 64 | 1)


class Write(int):
    """The number of a write from a master: one object of all copies of what was written, pickled without values.

    Attributes:
        values: what the master had then, where that was changed in place since.
    """

    values: Tensor | None = None

    def __copy__(self) -> Write:
        return self

    def __deepcopy__(self, memo: Any) -> Write:
        return self

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return Write, (int(self),)


class _Latest:
    """The write with the values of a master, as long as that is there."""

    __slots__ = ("master", "write")

    def __init__(self, master: Tensor) -> None:
        key = id(master)
        self.master = weakref.ref(master, lambda _, forget=_latest.pop: forget(key, None))
        self.write = 0


_ROUNDING = 0.25  # of the norm of a matrix: more than any format's rounding takes
_SLACK = 1.1  # of the distance: values may have been rounded to 16 bits before
_LOST = 2.0**-17  # of the largest magnitude: what 8-bit formats round to zero is smaller
_PROPOSED = -1  # write of a master that was loaded, see [Note: Masters that are loaded]
_OF_AN_ATTRIBUTE = 2  # references: its own, and that of the argument of sys.getrefcount
_numbers = _Numbers()
_masters: weakref.WeakKeyDictionary[QuantizedStorage, weakref.ref[Tensor]] = weakref.WeakKeyDictionary()
_latest: dict[int, _Latest] = {}  # by the id of a master


def next_write() -> Write:
    """Above 0."""
    return Write(next(_numbers.left))


def note_master(storage: QuantizedStorage, master: Tensor) -> None:
    """Says that a storage has the values of `master`, high precision, this rank's part of it, since its last write."""
    _masters[storage] = weakref.ref(master)
    note_write(master, int(storage.mastered))  # NOTE: not the object, which ends with the copies of what was written


def note_write(master: Tensor, write: int) -> None:
    """Says that this write had the values of a master."""
    found = _latest.get(id(master))
    if found is None:
        found = _latest[id(master)] = _Latest(master)
    found.write = write


def write_of(master: Tensor) -> int:
    """By which write weights have the values of a master, this rank's part of it; 0 where none has."""
    found = _latest.get(id(master))
    return 0 if found is None else found.write


def propose(storage: QuantizedStorage, master: Tensor) -> None:
    """Says that a master, this rank's part of it, was loaded for a weight: see [Note: Masters that are loaded]."""
    _masters[storage] = weakref.ref(master)
    note_write(master, _PROPOSED)


def exchange(storage: QuantizedStorage, master: Tensor, other: Tensor) -> None:
    """Says that a master of a storage, this rank's part of it, has become another tensor, with its values."""
    found = _masters.get(storage)
    if found is not None and found() is master:
        _masters[storage] = weakref.ref(other)
    note_write(other, write_of(master))


def are_near(values: Tensor, others: Tensor) -> bool:
    """Whether they differ by no more than rounding can account for, in any format. Waits for the device."""
    return bool(TENSOR.norm(values - others) <= _ROUNDING * TENSOR.norm(others))


def decide(storage: QuantizedStorage) -> None:
    """On a master that was proposed for a weight that is about to be changed in place, if there is one.

    Not while a graph is captured, for which nobody may wait.
    """
    master = noted_master(storage)
    if master is None or write_of(master) != _PROPOSED:
        return
    if storage.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    found = [storage.format[direction].codec.rounding for direction in storage.directions]
    known = [each for each in found if each is not None]
    rounding = max(known) if len(known) == len(found) else None
    if _is_rounded(storage.dequantize(torch.float32).view(master.shape), master, rounding):
        storage.note_master()
        note_master(storage, master)
    else:
        del _masters[storage]


def _is_rounded(values: Tensor, master: Tensor, rounding: float | None) -> bool:
    """Whether every value is that of the master, rounded to nearest by the weight's format. Waits for the device."""
    if rounding is None:
        return are_near(values, master)
    largest = master.abs().max() if master.numel() else 0.0
    return bool(((values - master).abs() <= _SLACK * rounding * master.abs() + _LOST * largest).all())


def former_values(storage: QuantizedStorage) -> Tensor | None:
    """What the master of a storage's values had, if that was changed in place since they were copied."""
    return getattr(storage.mastered, "values", None)


def noted_master(storage: QuantizedStorage) -> Tensor | None:
    """The master whose values a storage had at some time, if it is still there, beside it."""
    found = _masters.get(storage)
    master = None if found is None else found()
    return master if master is not None and master.device == storage.device else None


def master_of(storage: QuantizedStorage) -> Tensor | None:
    """The master whose values a storage has: nothing else was written since, into either."""
    master = noted_master(storage)
    return master if master is not None and write_of(master) == storage.mastered != 0 else None


def change(storage: QuantizedStorage, master: Tensor, values: Tensor, *, write: int) -> None:
    """Has a master take what its weight was given in place. `write`: by which the weight had the master's values."""
    _replace(master, values, write)
    storage.note_master()
    note_master(storage, master)


def change_part(storage: QuantizedStorage, values: Tensor, index: int) -> None:
    """As `change`, of one member of a group, whose master has the values of all.

    The master is copied where a copy of the group is there, which may be put back.
    """
    master = noted_master(storage)
    assert master is not None
    others = sys.getrefcount(storage.mastered) - (storage.latest_mastered is storage.mastered)
    if isinstance(storage.mastered, Write) and not is_alone(others):
        storage.mastered.values = master.clone()
    master.view(storage.shape)[index].copy_(values)
    storage.note_master()
    note_master(storage, master)


def is_alone(references: int) -> bool:
    """Whether an attribute holds the only reference to an object, by what `sys.getrefcount` says of the attribute."""
    return references <= _OF_AN_ATTRIBUTE


def put_back(storage: QuantizedStorage, master: Tensor | None, write: int) -> None:
    """After a weight was given the values of a copy: its master takes what it had when that was made, if it is known.

    Args:
        storage: with the values of the copy.
        master: of the weight before, see `noted_master`.
        write: by which the weight had values of a master before.
    """
    if master is None or master.device != storage.device:
        return
    _masters[storage] = weakref.ref(master)
    if write_of(master) == _PROPOSED:
        return
    former = former_values(storage)
    if former is None or former.shape != master.shape or write_of(master) == storage.mastered:
        return
    _replace(master, former, write)
    note_write(master, int(storage.mastered))


def _replace(master: Tensor, values: Tensor, write: int) -> None:
    if isinstance(write, Write) and write == write_of(master):
        write.values = master.clone()  # NOTE: gone at once where there is no copy of the weight
    master.copy_(values.view(master.shape))
