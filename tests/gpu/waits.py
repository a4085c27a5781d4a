"""Blocks in which the host must not wait for the GPU, and in which nothing may be allocated on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def never_waiting() -> Iterator[None]:
    """Where the host waits for the GPU, this raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def neither_waiting_nor_allocating() -> Iterator[None]:
    """The same; and nothing was allocated when the block ends."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with never_waiting():
        yield
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
