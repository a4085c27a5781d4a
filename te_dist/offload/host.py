"""Host memory for parked bytes: large slabs, handed out as byte ranges and taken back when their owner is dropped."""

from __future__ import annotations

import bisect
import functools
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

ALIGNMENT = 512  # bytes at which ranges start, as the allocators of devices have it

Range = tuple[int, int, int]  # (slab, first byte, end)
UNITS = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
SIZE = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})", re.ASCII)


def parse_bytes(size: int | str) -> int:
    """Bytes from a number, or from text such as "16GiB", "1.5GiB" or "512 MiB"; a fraction of a byte is dropped."""
    if isinstance(size, int):
        if size < 0:
            raise ValueError(f"got {size!r} for a number of bytes; it must be 0 or more")
        return size
    match = SIZE.fullmatch(size)
    if match is None:
        raise ValueError(f"got {size!r} for a number of bytes; write it as 1048576 or with one of {list(UNITS)}")
    return int(Fraction(match[1]) * (1 << UNITS[match[2]]))


class Block:
    """Host bytes of one owner, in one or more pieces. Dropping it gives them back to the pool.

    Attributes:
        nbytes: how many.
        pieces: 1-D uint8 host tensors that hold them, one after the other.
    """

    __slots__ = ("__weakref__", "_pool", "_ranges", "nbytes", "pieces")

    def __init__(self, pool: HostPool, ranges: list[Range], nbytes: int) -> None:
        self._pool, self._ranges, self.nbytes = pool, ranges, nbytes
        self.pieces = tuple(_cut(pool.views(ranges), nbytes))

    def __del__(self) -> None:
        # NOTE: this runs at any moment, in any thread: a deque takes it without a lock, `HostPool` sorts it in later.
        self._pool.returned.append((self._ranges, self.nbytes))


class HostPool:
    """Slabs of host memory with one list of free ranges. A block may be pieced together, so nothing fragments.

    Attributes:
        slab: bytes of one; a power of two, because torch rounds pinned allocations up to one.
        pinned: whether slabs are page-locked, so that a device copies to and from them on its own.
        before_reuse: called before bytes that were given back are handed out again.
        returned: (ranges, bytes) of dropped blocks that are not yet sorted in.
    """

    slab: ClassVar[int] = 64 << 20

    def __init__(self, *, pinned: bool, before_reuse: Callable[[], None] = lambda: None) -> None:
        self.pinned = pinned
        self.before_reuse = before_reuse
        self.returned: deque[tuple[list[Range], int]] = deque()
        self._lock = threading.Lock()  # around `_slabs`, `_free` and `_live`: each thread may run a model of its own
        self._slabs: list[Tensor] = []
        self._free: list[Range] = []  # sorted, neighbours merged
        self._live = 0

    @property
    def live(self) -> int:
        """Bytes in blocks that are still held."""
        with self._lock:
            self._sort_in()
            return self._live

    @property
    def reserved(self) -> int:
        """Bytes of all slabs."""
        return len(self._slabs) * self.slab

    def take(self, nbytes: int) -> Block:
        """Hands out `nbytes`, from free ranges first."""
        with self._lock:
            self._sort_in()
            ranges = list(self._ranges(-(-nbytes // ALIGNMENT) * ALIGNMENT))
            self._live += nbytes
        return Block(self, ranges, nbytes)

    def views(self, ranges: list[Range]) -> list[Tensor]:
        """The bytes of `ranges`."""
        return [self._slabs[slab][start:stop] for slab, start, stop in ranges]

    def _ranges(self, wanted: int) -> Iterator[Range]:
        while wanted:
            if not self._free:
                self._slabs.append(torch.empty(self.slab, dtype=torch.uint8, device="cpu", pin_memory=self.pinned))
                self._free.append((len(self._slabs) - 1, 0, self.slab))
            slab, start, stop = self._free.pop()
            used = min(stop - start, wanted)
            wanted -= used
            if start + used < stop:
                self._free.append((slab, start + used, stop))
            yield slab, start, start + used

    def _sort_in(self) -> None:
        returned = [self.returned.popleft() for _ in range(len(self.returned))]
        if returned:
            self.before_reuse()  # NOTE: last, since it waits for the copies of blocks that are dropped already
        for ranges, nbytes in returned:
            self._live -= nbytes
            for each in ranges:
                self._merge(each)

    def _merge(self, freed: Range) -> None:
        """Puts a range back among the free ones, one with those it touches."""
        at = bisect.bisect(self._free, freed)
        slab, start, stop = freed
        if at < len(self._free) and self._free[at][:2] == (slab, stop):
            stop = self._free.pop(at)[2]
        if at and (self._free[at - 1][0], self._free[at - 1][2]) == (slab, start):
            at -= 1
            start = self._free.pop(at)[1]
        self._free.insert(at, (slab, start, stop))


def _cut(views: list[Tensor], nbytes: int) -> Iterator[Tensor]:
    """`views` without what lies beyond `nbytes`: the last range is rounded up."""
    for view in views:
        yield view[:nbytes]
        nbytes -= min(nbytes, view.numel())


@functools.cache
def pool_of(device: torch.device) -> HostPool:
    """The process's pool for tensors of this device; it outlives the contexts, so that slabs are made once."""
    return HostPool(pinned=device.type != "cpu")
