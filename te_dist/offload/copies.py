"""Copies between a device and host memory: done on the spot on the CPU, on streams of their own on a GPU.

[Note: Copies on streams]
A saved tensor was written on the compute stream, where an event is recorded; the outgoing stream waits for it and
copies. The tensor must live until that copy is done, and the host runs far ahead of the device, so it cannot ask
whether it is. Instead the last tensors, up to a window of bytes, are held; when one leaves the window, the *compute
stream* waits for its copy and the reference is dropped: memory that the compute stream reuses afterwards is safe, and
the allocator has it back at a moment that does not depend on timing. On the way back the buffer is allocated on the
compute stream, filled on the incoming stream, and the compute stream waits before it reads. Two streams, because a
link carries both directions at once.

Where a model computes on several streams, the one meant is that which was current when the tensor was saved, or when
its way back began: the allocator reuses its memory there. Where backward reads on another one, the allocator is told.

What is dropped early, because its graph is, does no harm: a copy out of memory that was freed fills host bytes that
nobody reads, and those go to later copies on the same stream; for a copy into memory that nobody asked for in the end,
the compute stream waits before the memory is free.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Protocol

import torch
from torch import Tensor

from te_dist.offload.host import Block, HostPool, pool_of


class Done(Protocol):
    """A point that a copy reaches."""

    def wait(self, used: Tensor | None = None) -> None:
        """Makes whatever the caller's current stream does next come after it, such as what it uses `used` for."""

    def wait_at_owner(self) -> None:
        """The same for the stream that was current when the copy was asked for: the device memory is its own."""


class Copies:
    """Copies that are done when the call returns.

    Attributes:
        pool: host memory for this device.
        looks_ahead: whether copies started early overlap with anything.
    """

    looks_ahead = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: HostPool = pool_of(device)

    def out(self, source: Tensor, block: Block) -> Done:
        """Copies `source` (1-D uint8) into `block`."""
        _scatter(source, block)
        return _AT_ONCE

    def back(self, block: Block, parked: Done) -> tuple[Tensor, Done]:
        """Copies `block`, filled when `parked` is reached, into new device memory (1-D uint8)."""
        target = torch.empty(block.nbytes, dtype=torch.uint8, device=self.device)
        _collect(block, target)
        return target, _AT_ONCE


class StreamedCopies(Copies):
    """Copies that run beside the compute stream. See [Note: Copies on streams]."""

    looks_ahead = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._outgoing = torch.cuda.Stream(device)
        self._incoming = torch.cuda.Stream(device)
        # Host bytes that are handed out again may still be read by a copy back.
        self.pool.before_reuse = lambda: self._outgoing.wait_stream(self._incoming)

    def out(self, source: Tensor, block: Block) -> Done:
        self._outgoing.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._outgoing):
            _scatter(source, block)
        return _Reached(self._outgoing.record_event(), self.device)

    def back(self, block: Block, parked: Done) -> tuple[Tensor, Done]:
        target = torch.empty(block.nbytes, dtype=torch.uint8, device=self.device)
        self._incoming.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._incoming):
            parked.wait()
            _collect(block, target)
        return target, _Reached(self._incoming.record_event(), self.device)


class _AtOnce:
    """The end of a copy that is over."""

    def wait(self, used: Tensor | None = None) -> None:
        """Nothing is left to wait for."""

    def wait_at_owner(self) -> None:
        """Nothing is left to wait for."""


class _Reached:
    """An event on one of the copy streams."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event, self._device = event, device
        self._owner = torch.cuda.current_stream(device)

    def wait(self, used: Tensor | None = None) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        if used is not None and stream != self._owner:
            used.record_stream(stream)

    def wait_at_owner(self) -> None:
        self._owner.wait_event(self._event)


_AT_ONCE = _AtOnce()


COPIED = ("cpu", "cuda")  # types of devices that `copies_of` knows


_making = threading.Lock()


def copies_of(device: torch.device) -> Copies:
    """What copies tensors of `device`; one per process, since streams and pinned memory are dear."""
    with _making:  # or threads that come first together make two, which do not wait for each other's copies
        return _copies_of(device)


@functools.cache
def _copies_of(device: torch.device) -> Copies:
    if device.type == "cpu":
        return Copies(device)
    if device.type == "cuda":
        return StreamedCopies(device)
    raise ValueError(f"activations of {device} cannot be offloaded: te_dist runs on cpu and cuda")


def _scatter(source: Tensor, block: Block) -> None:
    at = 0
    for piece in block.pieces:
        piece.copy_(source[at : at + piece.numel()], non_blocking=True)
        at += piece.numel()


def _collect(block: Block, target: Tensor) -> None:
    at = 0
    for piece in block.pieces:
        target[at : at + piece.numel()].copy_(piece, non_blocking=True)
        at += piece.numel()
