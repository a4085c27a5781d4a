"""What is parked as one: a run of bytes of one storage, shared by all saved tensors that lie in it."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, UntypedStorage

from te_dist.offload.copies import Copies
from te_dist.offload.host import ALIGNMENT, Block
from te_dist.offload.writes import version_of


class Kept(Enum):
    """Why a saved tensor stays where it is."""

    PARAMETER = "a parameter, a view of one, or another tensor that outlives backward anyway"
    SMALL = "smaller than min_bytes"
    BUDGET = "the budget has no room for it, or is spread over others"
    FOREIGN = "not on the device that is offloaded, or not made of plain strided memory"


@dataclass
class Statistics:
    """Bytes that one context has moved, each storage counted once.

    Attributes:
        parked: copied to the host.
        restored: copied back.
        live: on the host now.
        peak: most that were on the host at a time.
        kept: number of saved tensors that stayed where they were, by reason.
    """

    parked: int = 0
    restored: int = 0
    live: int = 0
    peak: int = 0
    kept: Counter[Kept] = field(default_factory=Counter)

    def left(self, nbytes: int) -> None:
        """Counts bytes that are dropped from the host."""
        self.live -= nbytes


@dataclass(frozen=True)
class Extent:
    """A run of bytes of a storage: `start` to `stop`."""

    start: int
    stop: int

    @classmethod
    def of(cls, tensor: Tensor) -> Extent:
        """What parking `tensor` parks: all of its storage, where it spans half of that or more; else what it spans.

        The parts of a split along the last dimension interleave: each spans nearly everything, and all are had from
        one copy.
        """
        total, item = tensor.untyped_storage().nbytes(), tensor.element_size()
        first = int(tensor.storage_offset()) * item
        last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) * item
        start, stop = first - first % ALIGNMENT, last + item
        return cls(0, total) if 2 * (stop - start) >= total else cls(start, stop)

    def __len__(self) -> int:
        return self.stop - self.start


class Unit:
    """Parked bytes of one storage.

    A unit is *leaving* while `source` is held: its copy to the host may be running, and the bytes can be had from the
    source itself. It is *parked* once the source is let go, and *back* from its first use in backward on: then its
    host bytes are given up, and the device holds it until the last saved tensor in it is dropped.

    Attributes:
        extent: which bytes of the original storage.
        source: a tensor over the original storage; None once it was let go.
        before: the unit parked before this one, which backward will most likely ask for next.
    """

    def __init__(self, source: Tensor, extent: Extent, copies: Copies, *, written: int, statistics: Statistics) -> None:
        """`written`: see `writes_around`."""
        self.extent = extent
        self.source: Tensor | None = source
        self.before: weakref.ref[Unit] | None = None
        self._copies, self._statistics = copies, statistics
        self._version, self._written = version_of(source), written
        self._is_spoiled = False
        self._block: Block | None = copies.pool.take(len(extent))
        self._copied = copies.out(_bytes(source, extent), self._block)  # the latest copy, in either direction
        self._back: Tensor | None = None
        statistics.parked += len(extent)
        statistics.live += len(extent)
        statistics.peak = max(statistics.peak, statistics.live)
        weakref.finalize(self._block, statistics.left, len(extent)).atexit = False

    def __del__(self) -> None:
        if getattr(self, "_back", None) is not None:
            self._copied.wait_at_owner()

    @property
    def is_copied_aside(self) -> bool:
        """Whether its copies run beside the compute stream, so that it pays to start them early."""
        return self._copies.looks_ahead

    def holds(self, extent: Extent, versions: tuple[int, int]) -> bool:
        """Whether the bytes of `extent` of a tensor, written and written around so often, are among those parked."""
        is_same = versions == (self._version, self._written)
        return is_same and self.extent.start <= extent.start and extent.stop <= self.extent.stop

    def let_go(self) -> None:
        """Drops the source, after the copy of it in the order of the stream that it was saved on."""
        if self.source is not None:
            self._copied.wait_at_owner()
            self._check()
            self.source = None

    def prefetch(self) -> None:
        """Starts the copy back."""
        if self.source is None and self._back is None:
            assert self._block is not None
            self._back, self._copied = self._copies.back(self._block, self._copied)
            self._block = None
            self._statistics.restored += len(self.extent)

    def fetch(self) -> tuple[UntypedStorage, int]:
        """A storage with the bytes in it, and the byte of the original storage at which it starts."""
        if self.source is not None:
            self._check()
        if self._is_spoiled:
            raise RuntimeError(
                "a tensor saved for backward was modified in place while it was being copied to the host; save a copy "
                "of it, or modify a clone"
            )
        if self.source is not None:
            return self.source.untyped_storage(), 0
        self.prefetch()
        assert self._back is not None
        self._copied.wait(self._back)
        return self._back.untyped_storage(), self.extent.start

    def _check(self) -> None:
        assert self.source is not None
        self._is_spoiled = self._is_spoiled or version_of(self.source) != self._version


def _bytes(tensor: Tensor, extent: Extent) -> Tensor:
    """1-D uint8 view of the bytes of `extent` in the storage of `tensor`."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), extent.start, (len(extent),), (1,))
