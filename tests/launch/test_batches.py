"""The order of the text: complete, independent of ranks and restarts."""

import numpy as np
import pytest
import torch

from te_dist.launch.batches import Share, TrainingOrder, Windows, validation_batches
from te_dist.launch.errors import JobError

LENGTH = 4
TOKENS = np.arange(1 + 11 * LENGTH + 2, dtype=np.uint16)  # eleven windows and a rest


@pytest.fixture
def order() -> TrainingOrder:
    """Of eleven windows."""
    return TrainingOrder(Windows(TOKENS, LENGTH, "training"), seed=3)


def test_windows_overlap_by_the_last_target() -> None:
    windows = Windows(TOKENS, LENGTH, "training")
    assert windows.count == 11
    assert windows[np.array([0, 10])].tolist() == [[0, 1, 2, 3, 4], [40, 41, 42, 43, 44]]


def test_each_epoch_shows_every_window_once_in_an_order_of_its_own(order: TrainingOrder) -> None:
    first, second = order.indices(0, 11), order.indices(11, 11)
    assert sorted(first) == sorted(second) == list(range(11))
    assert first.tolist() != second.tolist()


def test_position_alone_says_what_comes_next(order: TrainingOrder) -> None:
    whole = order.indices(0, 30)
    resumed = TrainingOrder(Windows(TOKENS, LENGTH, "training"), seed=3).indices(9, 21)
    assert resumed.tolist() == whole[9:].tolist()


@pytest.mark.parametrize(("size", "micro_batch"), [(1, 8), (1, 2), (2, 4), (2, 2), (4, 1)])
def test_ranks_share_a_step_that_does_not_depend_on_their_number(
    order: TrainingOrder, size: int, micro_batch: int
) -> None:
    parts = [order.micro_batches(8, 8, Share(index, size, micro_batch)) for index in range(size)]
    together = torch.cat([batch for part in parts for batch in part])
    assert all(batch.shape == (micro_batch, LENGTH + 1) for part in parts for batch in part)
    assert together.tolist() == order.micro_batches(8, 8, Share(0, 1, 8))[0].tolist()


def test_every_rank_evaluates_as_many_full_batches() -> None:
    windows = Windows(TOKENS, LENGTH, "held-out")
    parts = [validation_batches(windows, limit=9, share=Share(index, 2, 2)) for index in range(2)]
    assert [[tuple(batch.shape) for batch in part] for part in parts] == [[(2, LENGTH + 1)] * 2] * 2
    firsts = sorted(int(row[0]) for part in parts for batch in part for row in batch)
    assert firsts == [LENGTH * (index * 11 // 8) for index in range(8)]


def test_too_little_text_is_refused() -> None:
    with pytest.raises(JobError, match="5 tokens.*data.sequence_length = 5"):
        Windows(TOKENS[:5], 5, "training")
    with pytest.raises(JobError, match="11 held-out sequences.*at least dp x train.micro_batch = 16"):
        validation_batches(Windows(TOKENS, LENGTH, "held-out"), limit=99, share=Share(0, 4, 4))
