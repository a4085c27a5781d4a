"""Which tokens a rank trains on at which step: a function of the position, so that a restart changes nothing.

The text is cut into windows of one sequence. A position counts the sequences that all ranks together have seen; it says
which windows come next, whatever the number of ranks. Nothing else is remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from te_dist.launch.errors import require


@dataclass(frozen=True)
class Share:
    """The part of every batch that a rank reads: `index` of `size` parts, `micro_batch` sequences at a time."""

    index: int
    size: int
    micro_batch: int


class Windows:
    """Sequences of a token stream.

    Attributes:
        tokens: (num_tokens,) of the whole text.
        length: tokens a sequence is trained on; one more is read, the last target.
    """

    def __init__(self, tokens: NDArray[np.unsignedinteger], length: int, name: str) -> None:
        self.tokens = tokens
        self.length = length
        self.count = (len(tokens) - 1) // length
        require(
            self.count > 0,
            f"{name} text",
            got=f"{len(tokens)} tokens",
            wanted=f"more than data.sequence_length = {length}",
            remedy="name more text or shorten the sequences",
        )

    def __getitem__(self, index: NDArray[np.integer]) -> Tensor:
        """The windows at `index` (n,) as int64 (n, length + 1), shorter at the end of no window."""
        columns = np.arange(self.length + 1)
        return torch.from_numpy(self.tokens[index[:, None] * self.length + columns].astype(np.int64))


class TrainingOrder:
    """Every window once per epoch, each epoch in an order of its own."""

    def __init__(self, windows: Windows, seed: int) -> None:
        self._windows = windows
        self._seed = seed

    def indices(self, position: int, count: int) -> NDArray[np.int64]:
        """The windows at positions `position` to `position + count`, across the end of an epoch if it lies there."""
        positions = np.arange(position, position + count)
        epochs, places = np.divmod(positions, self._windows.count)
        orders = {epoch: _permutation(self._windows.count, self._seed, epoch) for epoch in np.unique(epochs).tolist()}
        return np.array([orders[epoch][place] for epoch, place in zip(epochs.tolist(), places, strict=True)])

    def micro_batches(self, position: int, batch: int, share: Share) -> list[Tensor]:
        """What a rank runs in the step at `position`: int64 (micro_batch, length + 1) each.

        Args:
            position: sequences all ranks have seen before this step.
            batch: sequences of the step over all ranks.
            share: of this rank.
        """
        part = batch // share.size
        mine = self.indices(position, batch)[share.index * part : (share.index + 1) * part]
        return [self._windows[mine[first : first + share.micro_batch]] for first in range(0, part, share.micro_batch)]


def validation_batches(windows: Windows, limit: int, share: Share) -> list[Tensor]:
    """A rank's part of up to `limit` windows spread evenly over the held-out text.

    Every rank gets as many batches, all full: a forward pass of sharded parameters is a collective. A remainder
    that does not fill a micro batch on every rank is left out.
    """
    at_once = share.size * share.micro_batch
    rounds = min(limit, windows.count) // at_once
    require(
        rounds > 0,
        "evaluation",
        got=f"{windows.count} held-out sequences and evaluation.sequences = {limit}",
        wanted=f"at least dp x train.micro_batch = {at_once} of both",
        remedy="raise data.validation_fraction or evaluation.sequences, or lower train.micro_batch",
    )
    chosen = np.arange(rounds * at_once) * windows.count // (rounds * at_once)
    return [
        windows[chosen[(first + share.index) * share.micro_batch :][: share.micro_batch]]
        for first in range(0, rounds * share.size, share.size)
    ]


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(count)
