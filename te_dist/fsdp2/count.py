"""Counts the bytes that a sharded model sends, by parameter and by purpose."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from te_dist import _torch_private
from te_dist.fsdp2.footprint import dotted, parameters_between_steps
from te_dist.fsdp2.parameter import ShardedParameter
from te_dist.tensor import traffic
from te_dist.tensor.placement import local_tensor
from te_dist.tensor.traffic import Purpose

NAMELESS = ""  # what is sent for no parameter of the model


class CountedTraffic:
    """Bytes by parameter and purpose; a gather counts what arrives, a reduction what goes in.

    Attributes:
        sent: bytes by (name of a parameter, purpose). Amaxes of activations have an empty name.
    """

    def __init__(self) -> None:
        self.sent: Counter[tuple[str, Purpose]] = Counter()

    def nbytes(self, *purposes: Purpose, name: str | None = None) -> int:
        """Bytes of these purposes, or of all; of one parameter, or of all."""
        return sum(
            nbytes
            for (parameter, purpose), nbytes in self.sent.items()
            if (not purposes or purpose in purposes) and name in (None, parameter)
        )

    def __str__(self) -> str:
        """A table: a line for each parameter, a column for each purpose."""
        names = dict.fromkeys(name for name, _ in self.sent)
        rows = [("", *(purpose.value for purpose in Purpose))]
        rows += [(name or "-", *(f"{self.sent[name, purpose]:,}" for purpose in Purpose)) for name in names]
        rows += [("sum", *(f"{self.nbytes(purpose):,}" for purpose in Purpose))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                (row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)))
            )
            for row in rows
        )


@contextmanager
def count_traffic(model: nn.Module) -> Iterator[CountedTraffic]:
    """Counts, inside the context, what FSDP2 and the agreement on scales send for parameters of `model`.

    Nothing is launched or waited for; outside of the context nothing is counted. Replays of CUDA graphs are not seen.

    Args:
        model: with units that `fully_shard` wrapped.
    """
    counted, names = CountedTraffic(), {module: name for name, module in model.named_modules()}

    def add(module: nn.Module, name: str, nbytes: dict[Purpose, int]) -> None:
        if module in names:
            for purpose, number in nbytes.items():
                counted.sent[dotted(names[module], name), purpose] += number

    def gathered(module: nn.Module, name: str, nbytes: int) -> None:
        backward = _torch_private.in_backward()
        add(module, name, {Purpose.BACKWARD_GATHER if backward else Purpose.FORWARD_GATHER: nbytes})

    def reduced(module: nn.Module, name: str, scattered: int, over_replicas: int) -> None:
        add(module, name, {Purpose.REDUCE_SCATTER: scattered, Purpose.ALL_REDUCE: over_replicas})

    def agreed(owner: Any, nbytes: int) -> None:
        name = NAMELESS if owner is None else _name_of(owner, model, names)
        counted.sent[name, Purpose.OPTIMIZER if _in_step() else Purpose.AMAXES] += nbytes

    end = traffic.listen(agreed)
    try:
        with _torch_private.watched_collectives(gathered, reduced):
            yield counted
    finally:
        end()


# What torch wraps around the step of every optimizer, a wrapped one's inside of its wrapper's.
_STEP = Optimizer.profile_hook_step(lambda optimizer: None).__code__


def _in_step() -> bool:
    """Whether an optimizer's step is running in this thread: also after another has ended, or failed, inside of it."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _STEP:
        frame = frame.f_back
    return frame is not None


def _name_of(storage: Any, model: nn.Module, names: dict[nn.Module, str]) -> str:
    """The parameter whose memory `storage` views; members of groups do."""
    memory = [buffer.untyped_storage() for buffer in storage.buffers.values()]
    for name, param in parameters_between_steps(model, names):
        local = local_tensor(param)
        if isinstance(local, ShardedParameter):
            for buffer in local.storage.buffers.values():
                if any(buffer.untyped_storage() is each for each in memory):
                    return name
    return NAMELESS
