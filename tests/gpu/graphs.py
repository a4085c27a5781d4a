"""What a CUDA graph is going to hold, run before."""

from __future__ import annotations

from collections.abc import Callable

import torch


def warm_up(function: Callable[[], object]) -> None:
    """Runs it three times on a side stream, as torch asks for before a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
