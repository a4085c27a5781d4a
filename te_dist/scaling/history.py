"""What a tensor asks of delayed scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from te_dist.ops.advance_histories import ALGORITHMS
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
        if self.amax_compute_algo not in ALGORITHMS:
            raise ValueError(f'amax_compute_algo is "max" or "most_recent", got {self.amax_compute_algo!r}')

    @property
    def scaled_max(self) -> float:
        """What the largest magnitude is scaled to."""
        return FP8_MAX[self.fp8] * 2.0**-self.margin
