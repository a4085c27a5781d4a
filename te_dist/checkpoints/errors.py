"""The one error of this package, and how ranks come to raise it together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

SHOWN = 8  # problems of one kind that a message lists


def digest_of(value: Any) -> str:
    """Of a value that JSON can say, however its keys are ordered."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or cannot be read into this model. Raised on every rank alike."""


@dataclass(frozen=True)
class Ranks:
    """The processes that read or write a checkpoint together.

    Attributes:
        group: over which they talk; None for one process without `torch.distributed`.
    """

    group: dist.ProcessGroup | None

    @staticmethod
    def all() -> Ranks:
        """Every process of the default group."""
        return Ranks(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group) if self.group is not None else 0

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group) if self.group is not None else 1

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, in rank order, on every rank. Collective."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def differ(self, value: Any) -> bool:
        """Whether ranks have different values, which JSON can say. Collective; a digest is sent."""
        return len(set(self.gather(digest_of(value)))) > 1

    def have_all(self, found: Mapping[str, bool]) -> set[str]:
        """Names that are true on every rank that has them. Collective."""
        missing = set().union(*self.gather({name for name, is_here in found.items() if not is_here}))
        return found.keys() - missing

    def together(self, step: Callable[[], T]) -> T:
        """Runs `step`, which must not be collective, on every rank; what one rank raises, all raise. Collective.

        Raises:
            CheckpointError: `step` raised on some rank; names the ranks where they do not all say the same.
        """
        result, cause = None, None
        try:
            result = step()
        except Exception as error:
            cause = error
        messages = self.gather(None if cause is None else _text(cause))
        if any(message is not None for message in messages):
            raise CheckpointError(_merged(messages)) from None if isinstance(cause, CheckpointError) else cause
        return result  # type: ignore[return-value]


def listed(problems: Sequence[str]) -> str:
    """The first few of many problems, as text."""
    more = len(problems) - SHOWN
    return "; ".join(problems[:SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _merged(messages: Sequence[str | None]) -> str:
    """One message for all ranks."""
    said: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        if message is not None:
            said.setdefault(message, []).append(rank)
    if len(said) == 1 and len(next(iter(said.values()))) == len(messages):
        return next(iter(said))
    return listed([f"rank {', '.join(map(str, ranks))}: {message}" for message, ranks in said.items()])
