"""Bytes of tensors, counted by storage: what a block of code has allocated and what of it is still alive.

with StorageTracker() as tracker:
    loss = model(x).sum()
    loss.backward()
tracker.assert_alive(0, besides=[loss, *(p.grad for p in model.parameters())])
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, UntypedStorage
from torch.utils.weak import WeakIdKeyDictionary

from te_dist._torch_private import TorchDispatchMode, is_traceable_wrapper_subclass, tree_leaves
from te_dist.testing.asserts import inner_names


@dataclass(frozen=True)
class Allocation:
    """A living storage that grew in a tracked block.

    Attributes:
        nbytes: by how much it is larger now than before the block.
        shape, dtype: of the tensor through which it was seen first.
        op: the op that returned this tensor, or took it where it is older than the block.
        place: file and line, outside torch, that called the op.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str
    place: str

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.nbytes} bytes, {dtype}{list(self.shape)} from {self.op} at {self.place}"


@dataclass(frozen=True)
class _Sighting:
    """A storage as first seen: its size before the block, and the tensor it came with."""

    before: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str
    place: str


class StorageTracker(TorchDispatchMode):
    """Follows every storage that an op inside the block returns, takes or resizes, without keeping it alive.

    A storage counts once, however many tensors view it, with the bytes it has grown since it was first seen, so
    `untyped_storage().resize_(0)` frees and resizing back allocates. Sizes are those of the moment of asking, inside
    the block or later. Wrapper subclasses count by their inner tensors.

    Not seen: temporaries inside one op, and storages made without an op (`torch.from_numpy`, unpickling) until an op
    takes them.

    Args:
        counts: which tensors `peak` counts; None leaves it at 0, since it looks at all storages after every op.

    Attributes:
        peak: most bytes that were alive after an op; may be set back to 0.
    """

    def __init__(self, *, counts: Callable[[Tensor], bool] | None = None) -> None:
        super().__init__()
        self.peak = 0
        self._counts = counts
        self._ignored = WeakIdKeyDictionary()  # UntypedStorage -> None
        self._sightings = WeakIdKeyDictionary()  # UntypedStorage -> _Sighting
        self._resize_patch = mock.patch.object(UntypedStorage, "resize_", self._following(UntypedStorage.resize_))

    def __enter__(self) -> StorageTracker:
        self._resize_patch.start()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._resize_patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Lets subclasses run first, so that the ops on their inner tensors come here; records plain tensors."""
        kwargs = kwargs or {}
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        for tensor in _plain_tensors((args, kwargs)):
            self._see(tensor, str(func), before=tensor.untyped_storage().nbytes())
        result = func(*args, **kwargs)
        for tensor in _plain_tensors(result):
            self._see(tensor, str(func), before=0)
        self._measure()
        return result

    def alive(self, *, besides: Iterable[Tensor | None] = ()) -> list[Allocation]:
        """What has grown in the block and is still allocated, largest first.

        Args:
            besides: tensors whose storages are known to live and left out (results, gradients, optimizer state).
        """
        known = {id(storage) for storage in storages(besides)}
        found = [
            Allocation(storage.nbytes() - seen.before, seen.shape, seen.dtype, seen.op, seen.place)
            for storage, seen in self._sightings.items()
            if storage.nbytes() > seen.before and id(storage) not in known
        ]
        return sorted(found, key=lambda allocation: -allocation.nbytes)

    def bytes_alive(self, *, besides: Iterable[Tensor | None] = ()) -> int:
        """Sum over `alive`."""
        return sum(allocation.nbytes for allocation in self.alive(besides=besides))

    def assert_alive(self, nbytes: int, *, besides: Iterable[Tensor | None] = ()) -> None:
        """Asserts that exactly `nbytes` are alive, and lists them otherwise."""
        allocations = self.alive(besides=besides)
        total = sum(allocation.nbytes for allocation in allocations)
        listing = "".join(f"\n  {allocation}" for allocation in allocations)
        assert total == nbytes, f"{total} bytes are alive in {len(allocations)} storages, want {nbytes}:{listing}"

    def _see(self, tensor: Tensor, op: str, *, before: int) -> None:
        """Records the storage of `tensor` where it is new."""
        storage = tensor.untyped_storage()
        if storage not in self._sightings:
            self._sightings[storage] = _Sighting(before, tuple(tensor.shape), tensor.dtype, op, _caller())
            if self._counts is not None and not self._counts(tensor):
                self._ignored[storage] = None

    def _measure(self) -> None:
        """Brings `peak` up to date."""
        if self._counts is not None:
            grown = (
                storage.nbytes() - seen.before
                for storage, seen in self._sightings.items()
                if storage not in self._ignored
            )
            self.peak = max(self.peak, sum(grown))

    def _following(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """`UntypedStorage.resize_`, which is no op and so passes no dispatch mode, with a record of its storage."""

        def resize_(storage: UntypedStorage, size: int) -> Any:
            if storage not in self._sightings:
                self._sightings[storage] = _Sighting(storage.nbytes(), (size,), torch.uint8, "resize_", _caller())
            result = resize(storage, size)
            self._measure()
            return result

        return resize_


def storages(tensors: Iterable[Tensor | None]) -> list[UntypedStorage]:
    """Distinct storages behind tensors, wrapper subclasses by their inner tensors; `None` is passed over."""
    found = {id(storage): storage for tensor in tensors if tensor is not None for storage in _storages_of(tensor)}
    return list(found.values())


def allocated_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind tensors, each counted once."""
    return sum(storage.nbytes() for storage in storages(tensors))


def _storages_of(tensor: Tensor) -> Iterator[UntypedStorage]:
    """Storages of one tensor."""
    if is_traceable_wrapper_subclass(tensor):
        for name in inner_names(tensor):
            yield from _storages_of(getattr(tensor, name))
    else:
        yield tensor.untyped_storage()


def _plain_tensors(tree: Any) -> list[Tensor]:
    """Tensors with memory of their own in a nest of arguments or results."""
    return [
        leaf
        for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor)
        and leaf.layout == torch.strided
        and leaf.device.type != "meta"
        and not is_traceable_wrapper_subclass(leaf)
    ]


def _caller() -> str:
    """File and line of the innermost frame outside torch and this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module != __name__ and module.split(".")[0] != "torch":
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
