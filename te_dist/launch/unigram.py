"""The yardstick of a language model: guessing each token by how often it occurs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def unigram_loss(counts: NDArray[np.int64], batches: Iterable[Tensor]) -> float:
    """Mean negative log likelihood, in nats, of the targets under the training text's token frequencies.

    Args:
        counts: (vocab_size,) occurrences in the training text; one is added to each, so that none is impossible.
        batches: int64 (n, length + 1) each; the first column is never a target.
    """
    smoothed = torch.from_numpy(counts).double() + 1.0
    surprise = -(smoothed / smoothed.sum()).log()
    losses = [surprise[batch[:, 1:]] for batch in batches]
    return float(sum(loss.sum() for loss in losses) / sum(loss.numel() for loss in losses))
