"""A flag in device memory that turns a launch off, so that a captured graph can leave a cached weight as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist.ops._checks import check_dtype
from te_dist.ops.source import Source

DTYPES = (torch.int32, torch.float32)


def check_noop(noop: Tensor | None, x: Tensor | Source) -> None:
    """None, or one element beside `x`."""
    if noop is None:
        return
    check_dtype("noop", noop, DTYPES)
    if noop.numel() != 1 or noop.device != x.device:
        raise ValueError(
            f"noop: got shape {tuple(noop.shape)} on {noop.device}, wanted one element on {x.device}, as x; "
            "a launch reads it there"
        )


def is_set(noop: Tensor | None) -> bool:
    """Whether any bit of a flag on the CPU is set."""
    return noop is not None and noop.view(torch.int32).item() != 0
