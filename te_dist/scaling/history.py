"""Delayed scaling's arithmetic: a scale for the next step from the largest magnitudes of the last ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from te_dist.ops.quantize_float8_current import FP8_MAX


@dataclass(frozen=True)
class DelayedScalingRequest:
    """Asks the module that uses a tensor to keep an amax history for it.

    Attributes:
        fp8: "e4m3" or "e5m2".
        margin: the scale leaves this many powers of two unused.
        amax_history_len: steps the history covers.
        amax_compute_algo: "max" takes the largest amax of the history, "most_recent" the last one.
        reduce_amax: take the largest amax of all ranks of the group that `autocast` was given.
    """

    fp8: Literal["e4m3", "e5m2"] = "e4m3"
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        if self.fp8 not in FP8_MAX:
            raise ValueError(f"fp8 is one of {list(FP8_MAX)}, got {self.fp8!r}")
        if self.amax_history_len < 1:
            raise ValueError(f"amax_history_len is 1 or more, got {self.amax_history_len}")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(f'amax_compute_algo is "max" or "most_recent", got {self.amax_compute_algo!r}')

    @property
    def scaled_max(self) -> float:
        """What the largest magnitude is scaled to."""
        return FP8_MAX[self.fp8] * 2.0**-self.margin


def next_history(history: Tensor) -> Tensor:
    """`history` one step on.

    Args:
        history: f32 (length, n), a column per tensor. Row 0 collects the amax of the running step; the steps before it
            follow, the oldest in row 1.

    Returns:
        The same shape: everything moves up by one, row 0 becomes the last row and is cleared. Columns that saw no
        value this step (0 in row 0) stay.
    """
    rolled = torch.cat([history[1:], history[:1]])
    rolled[0].zero_()
    return torch.where(history[0] != 0, rolled, history)


def next_scale(history: Tensor, scale: Tensor, scaled_max: Tensor, *, algo: Literal["max", "most_recent"]) -> Tensor:
    """Scales for the next step, from the history as it is before `next_history`.

    Args:
        history: f32 (length, n).
        scale: f32 (n,), the present scales; kept where the amax is 0, infinite or NaN, or nothing was seen this step.
        scaled_max: f32 (n,), what the largest magnitude is scaled to.
    """
    last = history[0]
    # NaN entries are ignored, as by a maximum of numbers.
    amax = history.nan_to_num(nan=0.0, posinf=math.inf).amax(0) if algo == "max" else last
    fresh = (scaled_max / amax).clamp(max=torch.finfo(torch.float32).max)
    return torch.where((last != 0) & (amax > 0) & (amax < math.inf), fresh, scale)
