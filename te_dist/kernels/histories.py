"""Launches of `ops.advance_histories`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from te_dist.kernels.runtime import launch
from te_dist.kernels.spec import Layout, Spec, once

_MODULES, _COLS = 32, 32  # of a launch, of a block of threads
_HISTORY = ("history:P", "running:P", "scale:P", "scaled_max:P", "cols:q", "end:q")
_EACH = (f"each[{index}].{field}" for index in range(_MODULES) for field in _HISTORY)
_LAYOUT = Layout(" ".join(("length:q", *_EACH)))
_NO_MODULE = (0,) * len(_HISTORY)


@once
def advance(of_all: str) -> Spec:
    """Spec of the update; `of_all`: whether scales follow from whole histories."""
    return Spec("advance_histories.cuh", f"AdvanceHistories<{of_all}, {_MODULES}, {_COLS}>", _LAYOUT)


def advance_histories(
    histories: Sequence[Tensor],
    running: Sequence[Tensor],
    scales: Sequence[Tensor],
    scaled_max: Sequence[Tensor],
    of_all: bool,
) -> None:
    """See te_dist.ops.advance_histories."""
    modules = [each for each in zip(histories, running, scales, scaled_max, strict=True) if each[0].numel()]
    spec = advance("true" if of_all else "false")
    for first in range(0, len(modules), _MODULES):
        values, blocks = [len(histories[0])], 0
        batch = modules[first : first + _MODULES]
        for module in batch:
            cols = module[0].shape[1]
            blocks += -(-cols // _COLS)
            values += [*(tensor.data_ptr() for tensor in module), cols, blocks]
        launch(spec, histories[0], (blocks, 1), (*values, *_NO_MODULE * (_MODULES - len(batch))))
