"""Saves of several ranks: they wait for one another on all of them, and fail on all of them alike."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import pytest
from torch import nn
from torch.optim import SGD

from te_dist import checkpoints
from te_dist.checkpoints import saving, store
from te_dist.testing import device
from tests.checkpoints.forging import Touch, rewrite_metadata
from tests.checkpoints.small import filled, first_value, in_background, late_write


def save_over(rank: int, world: int, path: Path) -> tuple[list[str], float]:
    """Saves in the background and, to the same path, in the foreground; who wrote in which order, and what is there."""
    original, (write, order) = store.write, late_write()
    store.write = write
    try:
        future = checkpoints.async_save(path, model=filled(1.0, device()))
        checkpoints.save(path, model=filled(2.0, device()))
        assert future.result() is None
    finally:
        store.write = original
    return order, first_value(path, device())


def test_save_waits_for_the_one_in_the_background(ranks, tmp_path: Path) -> None:
    assert ranks(2).run(save_over, tmp_path / "step_1") == [(["background", "foreground"], 2.0)] * 2
    assert [place.name for place in tmp_path.iterdir()] == ["step_1"]


def save_after_a_failure(rank: int, world: int, path: Path) -> tuple[list[str], float]:
    """What is told of a save in the background that failed on one rank, and what the next one wrote."""
    original = saving._checksums

    def fails(where: Path, rank: int) -> dict[str, list[int]]:
        if rank == 1 and in_background():
            raise OSError(5, "Input/output error")
        return original(where, rank)

    saving._checksums = fails
    try:
        checkpoints.async_save(path / "step_1", model=filled(1.0, device()))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            checkpoints.save(path / "step_2", model=filled(2.0, device()))
    finally:
        saving._checksums = original
    return [str(each.message) for each in told if each.category is RuntimeWarning], first_value(
        path / "step_2", device()
    )


def test_a_failure_that_nobody_asked_for_is_told_on_every_rank(ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(save_after_a_failure, tmp_path)
    assert first == second
    (message,), value = first
    assert f"{tmp_path / 'step_1'} by an async_save: CheckpointError: rank 1: OSError: " in message
    assert value == 2.0
    assert [place.name for place in tmp_path.iterdir()] == ["step_2"]


def save_refused(rank: int, world: int, path: str) -> str:
    with pytest.raises(checkpoints.CheckpointError) as error:
        checkpoints.save(path, model=filled(1.0, device()))
    return str(error.value)


def test_what_is_refused_is_refused_on_every_rank(ranks, tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "c", model=nn.Linear(4, 4))
    (tmp_path / "c" / "thesis.tex").touch()
    for path, said in ((str(tmp_path / "c"), "thesis.tex"), (".", "ends in no name")):
        first, second = ranks(2).run(save_refused, path)
        assert first == second
        assert said in first
    assert (tmp_path / "c" / "thesis.tex").exists()


def load_refused(rank: int, world: int, path: Path) -> str:
    with pytest.raises(checkpoints.CheckpointError) as error:
        checkpoints.load(path, model=filled(1.0, device()))
    return str(error.value)


def test_a_pickle_that_runs_code_is_refused_on_every_rank(ranks, tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "c", model=nn.Linear(4, 4))
    rewrite_metadata(tmp_path / "c", pickle.dumps(Touch(tmp_path / "marker")))
    first, second = ranks(2).run(load_refused, tmp_path / "c")
    assert first == second
    assert "Path.touch" in first
    assert not (tmp_path / "marker").exists()


def load_different_things(rank: int, world: int, directory: Path) -> list[str]:
    """Ranks that name different checkpoints, and of which one names an optimizer."""
    model = filled(3.0, device())
    optimizer = SGD(model.parameters())
    errors = []
    for path, given in ((directory / f"step_{rank}", optimizer), (directory / "step_0", None if rank else optimizer)):
        with pytest.raises(checkpoints.CheckpointError) as error:
            checkpoints.load(path, model=model, optimizer=given)
        errors.append(str(error.value))
    assert model.weight[0, 0].item() == 3.0
    return errors


def test_ranks_read_one_checkpoint_and_the_same_of_it(ranks, tmp_path: Path) -> None:
    for step in (0, 1):
        model = filled(float(step))
        checkpoints.save(tmp_path / f"step_{step}", model=model, optimizer=SGD(model.parameters()))
    first, second = ranks(2).run(load_different_things, tmp_path)
    assert first == second
    steps = [f"{tmp_path}/step_{rank} with an optimizer on rank {rank}" for rank in (0, 1)]
    assert f"ranks differ in a checkpoint: got {steps[0]} and {steps[1]}, wanted the same" in first[0]
    assert f"{tmp_path}/step_0 with an optimizer on rank 0 and {tmp_path}/step_0 without an optimizer" in first[1]


def told_as_an_error(rank: int, world: int, path: Path) -> str:
    """One rank alone has asked how a save ended, and warnings are errors on all."""
    path.mkdir(exist_ok=True)
    (path / "notes").write_text("kept")
    future = checkpoints.async_save(path, model=filled(1.0, device()))
    if rank == 0:
        assert isinstance(future.exception(), checkpoints.CheckpointError)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(checkpoints.CheckpointError) as caught:
            checkpoints.save(path.parent / "next", model=filled(2.0, device()))
    return str(caught.value)


def test_a_warning_that_is_an_error_is_raised_on_all_ranks(ranks, tmp_path: Path) -> None:
    for message in ranks(2).run(told_as_an_error, tmp_path / "taken"):
        assert "nothing was written under" in message
