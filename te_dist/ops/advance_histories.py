"""Delayed scaling's arithmetic: scales for the next step from the largest magnitudes of the last ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from te_dist import kernels
from te_dist._torch_private import copy_each, zero_each
from te_dist.ops._checks import check_choice, check_matrix, check_packed
from te_dist.ops._library import register

ALGORITHMS = ("max", "most_recent")


def advance_histories(
    histories: Sequence[Tensor],
    *,
    running: Sequence[Tensor],
    scales: Sequence[Tensor],
    scaled_max: Sequence[Tensor],
    algo: Literal["max", "most_recent"],
) -> None:
    """Moves histories one step on, updates scales by them, and clears what the step has collected; all in place.

    The amax of the running step becomes the last row, the oldest row drops out and counts for the scale once more. A
    column whose amax is 0 has seen no value: its history and its scale stay. A scale is `scaled_max / amax`, at most
    the largest fp32 number; it stays where there is no finite amax above 0. On the GPU one launch serves 32 modules.

    Args:
        histories: f32 (length, n) of each module, a column for each scale. Row 0 belongs to the running step, and is
            zero in between; row 1 is the oldest.
        running: f32 (n,) each, amaxes of the running step, not negative; zero afterwards.
        scales: f32 (n,) each.
        scaled_max: f32 (n,) each, positive: what the largest magnitude is scaled to.
        algo: "max" takes the largest finite amax of the history and the running step, so that a step that overflowed,
            as the first ones under a GradScaler do, counts for itself alone; "most_recent" that of the running step.
    """
    check_choice("algo", algo, ALGORITHMS)
    if not len(histories) == len(running) == len(scales) == len(scaled_max):
        counts = [len(each) for each in (histories, running, scales, scaled_max)]
        raise ValueError(
            f"got {counts} histories, running, scales and scaled_max, wanted as many of each, one per module"
        )
    for index, history in enumerate(histories):
        check_matrix(f"histories[{index}]", history, (torch.float32,))
        if len(history) != len(histories[0]) or not len(history):
            raise ValueError(
                f"histories[{index}]: got {len(history)} rows, wanted {max(1, len(histories[0]))}, as the first has; "
                "call once for each length"
            )
        for name, each in (("running", running), ("scales", scales), ("scaled_max", scaled_max)):
            check_packed(f"{name}[{index}]", each[index], (torch.float32,), history.shape[1:])
    if histories:
        torch.ops.te_dist.advance_histories(histories, running, scales, scaled_max, algo == "max")


def _next_history(history: Tensor) -> Tensor:
    """`history` one step on; `history`: f32 (length, n), the amaxes of the running step in row 0.

    Returns:
        The same shape: everything moves up by one, row 0 becomes the last row and is cleared. Columns that saw no
        value this step (0 in row 0) stay.
    """
    rolled = torch.cat([history[1:], history[:1]])
    rolled[0].zero_()
    return torch.where(history[0] != 0, rolled, history)


def _next_scale(history: Tensor, scale: Tensor, scaled_max: Tensor, *, of_all: bool) -> Tensor:
    """Scales for the next step, from the history as it is before `_next_history`.

    Args:
        history: f32 (length, n).
        scale: f32 (n,), the present scales; kept where the amax is 0, infinite or NaN, or nothing was seen this step.
        scaled_max: f32 (n,), what the largest magnitude is scaled to.
        of_all: whether the amax is the largest of the history, or that of the running step.
    """
    last = history[0]
    amax = history.nan_to_num(nan=0.0, posinf=0.0).amax(0) if of_all else last
    fresh = (scaled_max / amax).clamp(max=torch.finfo(torch.float32).max)
    return torch.where((last != 0) & (amax > 0) & (amax < math.inf), fresh, scale)


def _cpu(
    histories: list[Tensor], running: list[Tensor], scales: list[Tensor], scaled_max: list[Tensor], of_all: bool
) -> None:
    """All of them side by side: calls of torch are few, however many modules there are."""
    history, sizes = torch.cat(histories, dim=1), [len(scale) for scale in scales]
    history[0].copy_(torch.cat(running))
    fresh = _next_scale(history, torch.cat(scales), torch.cat(scaled_max), of_all=of_all)
    copy_each(scales, fresh.split(sizes))
    copy_each(histories, _next_history(history).split(sizes, dim=1))
    zero_each(running)


register(
    "advance_histories(Tensor(a!)[] histories, Tensor(b!)[] running, Tensor(c!)[] scales, Tensor[] scaled_max, "
    "bool of_all) -> ()",
    _cpu,
    kernels.advance_histories,
)
