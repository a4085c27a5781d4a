"""Ops on many tensors at once: calls are recorded one by one, and run together as often as one likes.

The number of launches follows from the kinds of ops that are recorded, not from how many. What runs them is no op of
the dispatcher: that spends a third of a microsecond on every tensor of a list, together more than the launches take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_dist._torch_private import TorchDispatchMode
from te_dist.formats import WHOLE
from te_dist.kernels import amax, quantize
from te_dist.kernels.arguments import ELEMENTS
from te_dist.kernels.inputs import read
from te_dist.kernels.multi_tensor import Launches, Work, copy_task
from te_dist.kernels.task import Task

_CURRENT_AMAX = 8  # among the arguments of quantize_float8_current


def _quantizing(task: Callable[..., Task | None]) -> Callable[..., Task | None]:
    """By the arguments of an op whose first five are a source."""
    return lambda x, source, beside, sums, row_sums, *rest: task(read(x, source, beside, sums, row_sums), *rest)


def _amax_task(x: Tensor, source: str, beside: Sequence[Tensor], *rest: Any) -> Task | None:
    return amax.amax_task(read(x, source, beside), *rest)


_TASKS: dict[str, Callable[..., Task | None]] = {
    "copy_": copy_task,
    "tile_amax": _amax_task,
    "quantize_float8_current": _quantizing(quantize.float8_current_task),
    "quantize_float8_tensor": _quantizing(quantize.float8_tensor_task),
    "quantize_float8_block": _quantizing(quantize.float8_block_task),
    "quantize_mxfp8": _quantizing(quantize.mxfp8_task),
    "quantize_nvfp4": _quantizing(quantize.nvfp4_task),
}


class Call(NamedTuple):
    """One op and its arguments, in the order of its schema. Holds its tensors."""

    name: str
    arguments: tuple[Any, ...]

    def task(self) -> Task | None:
        """For the GPU; None where there is nothing to do."""
        return _TASKS[self.name](*self.arguments)

    @property
    def finds_amaxes(self) -> bool:
        """Whether it raises its last argument, which is zero beforehand, to amaxes."""
        return self.name == "tile_amax"

    def replace(self, tensors: Mapping[int, Tensor]) -> Call:
        """The same with other tensors in the place of some, by their ids."""
        return Call(self.name, tuple(tensors.get(id(argument), argument) for argument in self.arguments))

    def run(self) -> None:
        """Alone, as it was called."""
        namespace = torch.ops.aten if self.name == "copy_" else torch.ops.te_dist
        getattr(namespace, self.name)(*self.arguments)


class _Unrecordable(Exception):
    """What is recorded does more than ops that can be run together."""


class _Recorder(TorchDispatchMode):
    """Notes ops instead of running them. Views and allocations are made: they are what ops are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "te_dist":
            self.calls += _as_calls(name, args)
            return None
        if name == "copy_" and _is_plain_copy(*args[:2]):
            self.calls.append(Call(name, args))
            return args[0]
        if func.is_view or name.startswith("empty"):
            return func(*args, **(kwargs or {}))
        raise _Unrecordable(func.name())


def _as_calls(name: str, arguments: tuple[Any, ...]) -> list[Call]:
    """An op as calls of ops that can be run together."""
    if name == "direction_amax":
        *matrix, hadamard, row_amax, col_amax = arguments
        if hadamard is None:
            found = torch.empty((1, 1), device=matrix[0].device)
            copies = [Call("copy_", (out, found)) for out in (row_amax, col_amax) if out is not None]
            return [Call("tile_amax", (*matrix, (0, 0), (WHOLE, WHOLE), found)), *copies]
    finds_amax = name == "quantize_float8_current" and arguments[_CURRENT_AMAX] is None
    if name not in _TASKS or finds_amax:
        raise _Unrecordable(name)
    return [Call(name, arguments)]


def _is_plain_copy(target: Tensor, source: Tensor) -> bool:
    return (
        target.dtype in ELEMENTS
        and source.dtype in ELEMENTS
        and target.device == source.device
        and target.numel() == source.numel()
        and target.is_contiguous()
        and source.is_contiguous()
    )


def record(function: Callable[[], None]) -> list[Call] | None:
    """The ops that `function` calls, in their order, none of which is run; None where it does anything else."""
    recorder = _Recorder()
    try:
        with recorder:
            function()
    except _Unrecordable:
        return None
    return recorder.calls


class Batch:
    """Recorded calls on many tensors.

    Args:
        sequences: calls of one sequence run in their order, those of different ones at any time. What amaxes are
            written to is zero.
        noop: int32 (1,), on the device of all tensors; where it is set, nothing is done.
    """

    def __init__(self, sequences: Sequence[Sequence[Call]], noop: Tensor) -> None:
        self._noop = noop
        longest = max(map(len, sequences), default=0)
        self._stages = [[sequence[i] for sequence in sequences if i < len(sequence)] for i in range(longest)]
        self._launches = [_launches(stage, noop) for stage in self._stages] if noop.is_cuda else []

    @property
    def calls(self) -> list[Call]:
        """In an order in which they can run."""
        return [call for stage in self._stages for call in stage]

    def run(self) -> None:
        """All of them."""
        if self._noop.is_cuda:
            for launches in self._launches:
                launches.run()
        elif not self._noop.item():
            for call in self.calls:
                call.run()


def _launches(calls: Sequence[Call], noop: Tensor) -> Launches:
    works = []
    for call in calls:
        task = call.task()
        if task is not None and task.blocks:
            values = (*task.x.values, *task.values)
            works.append(Work(partial(task.kernel, task.x.source), task.widths, task.narrowest, task.blocks, values))
    return Launches(works, noop)
