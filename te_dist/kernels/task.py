"""A kernel and what it is to work on, before it is launched: alone, or with others of its kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from te_dist.kernels.inputs import Input, Source
from te_dist.kernels.runtime import launch
from te_dist.kernels.spec import Spec, overlapped

Widths = tuple[int, ...]


class Task(NamedTuple):
    """One matrix for a kernel that goes by blocks of threads in one dimension.

    Attributes:
        x: what the kernel reads.
        kernel: spec by source and by the bytes accessed at a time.
        widths: the widest accesses that all addresses allow.
        narrowest: accesses that any address allows.
        blocks: number of blocks of threads.
        values: of the kernel's parameters, but for those of the source, which come first.
    """

    x: Input
    kernel: Callable[[Source, Widths], Spec]
    widths: Widths
    narrowest: Widths
    blocks: int
    values: tuple[int | float, ...]


def start(task: Task | None, *, overlaps: bool = False) -> None:
    """Launches a task alone; None is nothing to do. `overlaps`: see `Spec`."""
    if task is not None:
        x = task.x
        spec = task.kernel(x.source, task.widths)
        if overlaps:
            spec = overlapped(spec)
        launch(spec, x.tensor, (task.blocks, 1), (*x.values, *task.values))
