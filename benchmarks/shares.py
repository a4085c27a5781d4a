"""What part of a call's time on the GPU each op takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from te_dist._torch_private import TorchDispatchMode

NUM_SHARES = 20


class Watched(TorchDispatchMode):
    """Changes nothing, but that te_dist calls its ops one by one, under their names."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def shares_of(run: Callable[[], None]) -> list[str]:
    """Lines of a Markdown table: ops of a pass by their part of its time on the GPU."""
    with Watched(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    ops = [event for event in profiler.key_averages() if event.device_type == DeviceType.CPU]
    ops.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in ops)
    lines = [
        f"| {op.key[:90]} | {op.count} | {op.self_device_time_total:.0f} | {op.self_device_time_total / total:.1%} |"
        for op in ops[:NUM_SHARES]
    ]
    return ["| op | calls | us | part |", "|---|---|---|---|", *lines]
