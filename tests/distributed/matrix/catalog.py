"""What a situation is, and the list of all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from te_dist.formats import Format

Formats = tuple[Format, ...]
Cells = Callable[[Formats], str | None]

# By what a refusal says, why torch leaves no other way.
REASONS = {
    "inside a stored byte": "torch cuts rows where `torch.chunk` does, here between rows whose values share a byte",
    "cannot reshard quantized parameters to a smaller mesh": "torch reshards to a smaller mesh only what it gathers "
    "itself; with its own `fully_shard` the first pass fails, by an `AssertionError` or `NotImplementedError`",
    "the trained parameters of one unit have one dtype": "torch reduces the gradients of a unit in one buffer of "
    "one type",
    "Inference tensors cannot be saved for backward": "torch makes what it gathers once, here plain parameters in "
    "inference mode, which autograd then refuses; plain models fail alike",
    "FSDP2 cannot size them again": "torch allocates the buffers of a gather at the first one and never again",
}


@dataclass(frozen=True)
class Situation:
    """One column of the table.

    Attributes:
        name: of the function that runs it.
        title: for people.
        group: under which the documentation lists it.
        world: how many ranks.
        run: for these formats, on every rank; raises where a comparison fails. Text where torch has it refused.
        since: the oldest torch that has what it needs.
        together: whether one model has all formats, in modules of their own; each has a model for itself otherwise.
    """

    name: str
    title: str
    group: str
    world: int
    run: Cells
    since: tuple[int, int]
    together: bool

    @property
    def is_here(self) -> bool:
        """Whether this torch has what it needs."""
        return torch.__version__ >= self.since  # a TorchVersion compares with tuples


SITUATIONS: dict[str, Situation] = {}


def situation(
    title: str, group: str, *, world: int = 2, since: tuple[int, int] = (2, 11), together: bool = True
) -> Callable[[Cells], Cells]:
    """Decorator: `run(formats)` is a situation of the matrix, for each by itself where torch refuses some."""

    def register(run: Cells) -> Cells:
        name = run.__name__
        assert name not in SITUATIONS
        SITUATIONS[name] = Situation(name, title, group, world, run, since, together)
        return run

    return register


def reason_of(refusal: str) -> str:
    """Why torch leaves no other way; raises where no reason is known."""
    found = [reason for pattern, reason in REASONS.items() if re.search(pattern, refusal)]
    if len(found) != 1:
        raise AssertionError(f"refused without a reason that torch imposes: {refusal}")
    return found[0]
