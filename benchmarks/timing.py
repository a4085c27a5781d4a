"""Times of calls on a GPU whose L2 cache is cold."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median_high

import torch

FLUSHED_BYTES = 256 * 2**20
COPY_GRAIN = 2**18  # copies of other sizes are slower
_AHEAD = 2_000_000  # cycles that the device waits while the host issues a call
_WARMUP = 3


def median_time(call: Callable[[], object], repeats: int) -> float:
    """Microseconds of one call with a cold L2 cache, its launches issued before it begins."""
    return median_times([call], repeats)[0]


def median_times(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """The same of several calls, by turns in random order: the clock of a GPU falls as it gets warm."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    pairs = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)] for _ in calls]
    for call in calls:
        for _ in range(_WARMUP):
            call()
    chance = random.Random(0)
    for turn in range(repeats):
        for place in chance.sample(range(len(calls)), len(calls)):
            begin, end = pairs[place][turn]
            torch.cuda._sleep(_AHEAD)
            flushed.zero_()
            begin.record()
            calls[place]()
            end.record()
    torch.cuda.synchronize()
    return [median_high(begin.elapsed_time(end) * 1e3 for begin, end in events) for events in pairs]


def copy_time(nbytes: int, repeats: int) -> float:
    """Microseconds of a device copy that reads and writes `nbytes` in all, at the rate of one without an odd end."""
    size = nbytes // 2 // COPY_GRAIN * COPY_GRAIN
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    return median_time(lambda: target.copy_(source), repeats) * nbytes / (2 * size)
