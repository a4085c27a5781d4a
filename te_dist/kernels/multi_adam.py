"""Launches of Adam over many tensors. See te_dist.ops.multi_adam."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from te_dist.kernels.arguments import ELEMENTS, access_bytes, pointer
from te_dist.kernels.inputs import adam
from te_dist.kernels.multi_tensor import Launches, Pointers, Work, reading, reading_blocks, upload
from te_dist.kernels.runtime import launch
from te_dist.kernels.spec import Layout, Spec
from te_dist.kernels.task import Task

_WIDE, _NARROW = 16, 4  # bytes accessed at a time
_OCTET = 8  # elements of a row that a thread updates
_ADVANCE_THREADS = 128
_FACTORS = 10  # floats of `AdamFactors`
_RULE = " ".join(f"rule.{name}:d" for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled"))
_SIGNALS = " ".join(f"signals.{name}:P" for name in ("lr", "grad_scale", "found_inf"))
ADVANCE = Spec("adam.cuh", "AdvanceSteps", Layout(f"{_RULE} {_SIGNALS} steps:P factors:P count:q is_left_out:P"))


class AdamLaunches:
    """Adam over groups of tensors.

    Args:
        groups: value, exp_avg, exp_avg_sq, step, and copy or None of every tensor of each group.
        grads: of all tensors, group by group; others may come later, of the same dtypes and alignments.
        tasks: of all tensors, what is done with the updated values meanwhile, or None.
        noop: int32 (1,), set where a step is left out.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[tuple[Tensor | None, ...]]],
        grads: Sequence[Tensor],
        tasks: Sequence[Task | None],
        noop: Tensor,
    ) -> None:
        tensors = [tensor for group in groups for tensor in group]
        device = noop.device
        self._counts, self._noop = [len(group) for group in groups], noop
        self._factors = torch.empty(len(tensors), _FACTORS, device=device)
        steps = torch.tensor([step.data_ptr() for *_, step, _ in tensors], dtype=torch.int64)
        self._steps = upload(steps.numpy().tobytes(), device).view(torch.int64)
        self._grads = Pointers(len(tensors), device)
        works = [
            self._work(index, (tensors[index], grads[index]), tasks[index])
            for index in range(len(tensors))
            if grads[index].numel()
        ]
        self._launches = Launches(works, self._noop)

    def run(
        self,
        grads: Sequence[Tensor],
        rules: Sequence[tuple[float, ...]],
        signals: Sequence[tuple[Tensor | None, ...]],
    ) -> None:
        """Counts the steps and updates. `signals`: lr, grad_scale and found_inf of each group."""
        self._grads.write([grad.data_ptr() for grad in grads])
        first = 0
        for count, rule, own in zip(self._counts, rules, signals, strict=True):
            if count:
                steps, factors = self._steps[first:].data_ptr(), self._factors[first:].data_ptr()
                values = (*rule, *map(pointer, own), steps, factors, count, self._noop.data_ptr())
                launch(ADVANCE, self._factors, (-(-count // _ADVANCE_THREADS), 1), values)
            first += count
        self._launches.run()

    def _work(self, index: int, each: tuple[tuple[Tensor | None, ...], Tensor], task: Task | None) -> Work:
        (value, exp_avg, exp_avg_sq, _, copy), grad = each
        source = adam(ELEMENTS[grad.dtype], ELEMENTS[value.dtype])
        moments = (exp_avg.data_ptr(), exp_avg_sq.data_ptr())
        own = (value.data_ptr(), *moments, self._grads.address(index), self._factors[index].data_ptr())
        addresses = (*own[:3], grad.data_ptr(), pointer(copy))
        if task is None:
            wide = _width(addresses, value.numel())
            kernel = partial(reading, source, copy=ELEMENTS[copy.dtype] if copy is not None else "Nothing")
            return Work(kernel, (wide,), (_NARROW,), reading_blocks(value), (*own, value.numel(), pointer(copy)))
        assert copy is None
        _, cols, _, phase = task.values[:4]
        widths = (_width(addresses, cols, phase), *task.widths[1:])
        kernel = partial(task.kernel, source)
        return Work(kernel, widths, (_NARROW, *task.narrowest[1:]), task.blocks, (*own, *task.values))


def _width(addresses: tuple[int, ...], *extents: int) -> int:
    aligned = access_bytes(_WIDE, *addresses) == _WIDE and access_bytes(_OCTET, *extents) == _OCTET
    return _WIDE if aligned else _NARROW
