"""Tensors that share bytes with others, or look as if they did: what has to be known before one of them is written.

Parts of quantized tensors have bytes of their own, so that what is written into a part is not in the whole.

A scale may cover more than the part; new values of the part alone have no place in the whole. Ordinary code that takes
a slice for a view would lose what it writes; it is told so for as long as the whole lives. Parts of what a checkpoint
fills (`tensor.filling`) are written through.

A gathered parameter reads the scale that every shard has whole out of the shard. Before either of them is written it
takes a copy: its other bytes belong to the scale of before, and those of the shard to the one that the shard has.

What a weight keeps of the values it was quantized from may lie in memory that others hold too (`Lent`), as the tensors
of a state dictionary do: a copy of all of them would take that memory twice. It is read as long as nobody writes there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from te_dist._torch_private import tree_map_only
from te_dist.tensor.storage import QuantizedStorage
from te_dist.tensor.untyped import TENSOR

_Storage = TypeVar("_Storage", bound=QuantizedStorage)


@dataclass(frozen=True)
class _Origin:
    """What a part was taken out of.

    Attributes:
        whole: until it is gone.
        filled_as: the name in a checkpoint, where what is copied into the part is written into the whole; else None.
    """

    whole: weakref.ref[QuantizedStorage]
    filled_as: str | None = None


class Reader(Protocol):
    """A storage that reads buffers of another one as its own."""

    def keep_read(self) -> None:
        """Before these are written: copies them, if they are still needed."""


_READERS: weakref.WeakKeyDictionary[Any, weakref.ref[Reader]] = weakref.WeakKeyDictionary()
_BROADCAST: weakref.WeakSet[QuantizedStorage] = weakref.WeakSet()
_ORIGINS: weakref.WeakKeyDictionary[QuantizedStorage, _Origin] = weakref.WeakKeyDictionary()
_BESIDE: weakref.WeakKeyDictionary[QuantizedStorage, list[tuple[Any, Any]]] = weakref.WeakKeyDictionary()


class Lent(torch.Tensor):
    """Values in memory that whoever made them may still hold; what is done with them is done with plain tensors.

    Writes are those that torch counts: what goes past it (`.data`, numpy) is not seen.

    Attributes:
        plain: the same memory.
        version: of `plain`, when it was lent.
        place: of the weight that keeps it, for messages.
    """

    plain: Tensor
    version: int
    place: str

    @classmethod
    def of(cls, plain: Tensor, place: str) -> Self:
        """`plain`, which counts its writes, in its memory."""
        lent = plain.as_subclass(cls)
        lent.plain, lent.version, lent.place = plain, plain._version, place
        return lent

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, cls._unchanged, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _unchanged(self) -> Tensor:
        """`plain`; raises RuntimeError where it was written since."""
        if self.plain._version != self.version:
            shape = tuple(self.plain.shape)
            raise RuntimeError(
                f"{self.place} got other values in the memory of those it was quantized from, of shape {shape}, which "
                "preserve_high_precision_init_val keeps without a copy; wanted them as they were. Somebody has written "
                "there, as into tensors of a state dict from before te_dist.convert: clone before that what is to be "
                "changed in place ({name: value.clone() for ...}), or load the values again"
            )
        return self.plain


def kept_on_cpu(plain: Tensor, place: str) -> Tensor:
    """`plain` on the CPU: what lies there already is lent, or copied where nobody could tell that it was written."""
    if plain.device.type != "cpu":
        return plain.cpu()
    return plain.clone() if plain.is_inference() else Lent.of(plain, place)


def note(part: _Storage, whole: QuantizedStorage) -> _Storage:
    """Remembers what `part` was taken out of, in the end where that is a part too; gives it back."""
    whole = whole if whole.owner is None else whole.owner  # views of members come and go
    first = _ORIGINS.get(whole)
    _ORIGINS[part] = _Origin(weakref.ref(whole)) if first is None or first.whole() is None else first
    return part


def taken_from(part: QuantizedStorage) -> QuantizedStorage | None:
    """What `part` was taken out of, as long as that is there; None for what is no part."""
    origin = _ORIGINS.get(part)
    return None if origin is None else origin.whole()


def note_filled(part: _Storage, whole: QuantizedStorage, name: str) -> _Storage:
    """Has what is copied into `part`, or into parts of it, written into `whole`; gives it back. `name`: of what."""
    _ORIGINS[part] = _Origin(weakref.ref(whole), name)
    return part


def filled_by(part: QuantizedStorage) -> QuantizedStorage | None:
    """The storage into which what is copied into `part` belongs; None where it has a place of its own."""
    origin = _ORIGINS.get(part)
    return origin.whole() if origin is not None and origin.filled_as is not None else None


def filled_as(part: QuantizedStorage) -> str:
    """The name that `note_filled` was told."""
    name = _ORIGINS[part].filled_as
    assert name is not None
    return name


def note_reader(storage: QuantizedStorage, reader: Reader) -> None:
    """Remembers who reads buffers of `storage` as its own, until one of the two is written."""
    _READERS[storage] = _READERS[reader] = weakref.ref(reader)


def before_writing(storage: QuantizedStorage) -> None:
    """To be called before others are written into the buffers of a shard or of what was gathered, by whatever means."""
    _BROADCAST.discard(storage)
    known = _READERS.pop(storage, None)
    reader = None if known is None else known()
    if reader is not None:
        reader.keep_read()


def note_broadcast(storage: QuantizedStorage) -> None:
    """Remembers, until it is written, that ranks sent each other its values: others may hold them in plain tensors."""
    _BROADCAST.add(storage)


def was_broadcast(part: QuantizedStorage) -> bool:
    """Whether that holds for a storage, or for what it was taken out of."""
    origin = _ORIGINS.get(part)
    return part in _BROADCAST or (origin is not None and origin.whole() in _BROADCAST)


def is_same_part(a: QuantizedStorage, b: QuantizedStorage) -> bool:
    """Whether both hold the same part of a matrix, or of each member of a group, or all of it; the same on all ranks.

    It does not matter by which ways of cutting they came to it. A part of what was broadcast is values on other ranks.
    """
    return a.region == b.region and _dims_cut(a) == _dims_cut(b) and not was_broadcast(a)


def _dims_cut(storage: QuantizedStorage) -> frozenset[int]:
    """Dimensions (0: rows, 1: columns) along which other parts of the matrices lie elsewhere."""
    cut = storage.cut
    is_row_shard = cut is not None and cut.dim == storage.matrix_dim and not cut.leaves_all(storage.place)
    return storage.cut_dims | {0} if is_row_shard else storage.cut_dims


def note_beside(parts: Sequence[QuantizedStorage]) -> None:
    """Remembers where parts that ranks are going to hold side by side lie: no cut of one whole says so."""
    places = [(part.place, part.cut) for part in parts]
    _BESIDE.update((part, places) for part in parts)


def lying_beside(part: QuantizedStorage) -> list[tuple[Any, Any]] | None:
    """(place, cut) of the part of every rank, in order, as `note_beside` was told; None for other parts."""
    return _BESIDE.get(part)


def note_alike(blank: QuantizedStorage, like: QuantizedStorage) -> None:
    """Remembers of what will hold another rank's values what is known of `like`, which is here in their place."""
    if was_broadcast(like):
        note_broadcast(blank)
    if like in _BESIDE:
        _BESIDE[blank] = _BESIDE[like]


def check_writable(tensor: Any) -> None:
    """Before values or bytes are written into a tensor.

    Raises:
        NotImplementedError: it is a part, and the whole would not see them.
    """
    storage = getattr(tensor, "storage", None)
    if not isinstance(storage, QuantizedStorage):
        return
    before_writing(storage)
    if storage.owner is not None and isinstance(storage.owner.initial, Lent):  # where the member's values are written
        storage.owner.initial = TENSOR.clone(storage.owner.initial)
    origin = _ORIGINS.get(storage)
    if origin is not None and origin.whole() is not None and tensor.numel():
        raise NotImplementedError(
            f"cannot write into a part of shape {tuple(tensor.shape)} of a quantized tensor: it has bytes of its own, "
            "and the whole would not change. Write the whole (values = whole.dequantize(); values[...] = ...; "
            "whole.copy_(values)), or clone the part to use it alone: a weight that was given one "
            "(weight.data = whole[:n]) is given weight.data = whole[:n].clone() before it is loaded or changed in place"
        )
