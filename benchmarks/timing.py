"""Times of calls on a GPU whose L2 cache is cold."""

from __future__ import annotations

from collections.abc import Callable

import torch

FLUSHED_BYTES = 256 * 2**20
COPY_GRAIN = 2**18  # copies of other sizes are slower
_AHEAD = 2_000_000  # cycles that the device waits while the host issues a call


def median_time(call: Callable[[], object], repeats: int) -> float:
    """Microseconds of one call with a cold L2 cache, its launches issued before it begins."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for _ in range(3):
        call()
    for begin, end in events:
        torch.cuda._sleep(_AHEAD)
        flushed.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) * 1e3 for begin, end in events)[repeats // 2]


def copy_time(nbytes: int, repeats: int) -> float:
    """Microseconds of a device copy that reads and writes `nbytes` in all, at the rate of one without an odd end."""
    size = nbytes // 2 // COPY_GRAIN * COPY_GRAIN
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    return median_time(lambda: target.copy_(source), repeats) * nbytes / (2 * size)
