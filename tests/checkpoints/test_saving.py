"""Saves that follow one another, and what they say of where they write."""

from __future__ import annotations

import shutil
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from torch import nn

from te_dist import checkpoints
from te_dist.checkpoints import saving, store
from tests.checkpoints.small import filled, first_value, late_write


def late(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has saves in the background wait for one in the foreground, for a while; who wrote in which order."""
    write, order = late_write()
    monkeypatch.setattr(store, "write", write)
    return order


def no_space(*args: object) -> None:
    raise OSError(28, "No space left on device")


# -- one at a time -------------------------------------------------------------------------------------------------


def test_save_waits_for_the_one_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, order = tmp_path / "step_1", late(monkeypatch)
    future = checkpoints.async_save(path, model=filled(1.0))
    checkpoints.save(path, model=filled(2.0))
    assert future.result() is None
    assert order == ["background", "foreground"]
    assert first_value(path) == 2.0
    assert [place.name for place in tmp_path.iterdir()] == ["step_1"]


def test_what_is_being_written_is_not_called_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late(monkeypatch)
    monkeypatch.setattr(saving, "_WRITING", [])  # where it is called off, all that follow would wait for it
    future = checkpoints.async_save(tmp_path / "step_1", model=filled(1.0))
    assert not future.cancel()
    assert future.result() is None


# -- failures in the background ------------------------------------------------------------------------------------


def save_later(path: Path, model: nn.Module) -> None:
    checkpoints.async_save(path, model=model).result()


def save_now(path: Path, model: nn.Module) -> None:
    checkpoints.save(path, model=model)


@pytest.mark.parametrize("again", [save_now, save_later])
def test_the_next_save_tells_of_a_failure_that_nobody_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: Callable[[Path, nn.Module], None]
) -> None:
    with monkeypatch.context() as patches:
        patches.setattr(store, "write", no_space)
        future = checkpoints.async_save(tmp_path / "step_1", model=filled(1.0))
        wait([future])
    with pytest.warns(RuntimeWarning, match=r"step_1 by an async_save: OSError: .* No space left on device") as told:
        again(tmp_path / "step_2", filled(2.0))
    assert [warning.filename for warning in told] == [__file__]
    assert first_value(tmp_path / "step_2") == 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is told once
        again(tmp_path / "step_3", filled(3.0))


@pytest.mark.parametrize("asked", ["result", "exception"])
def test_a_failure_that_was_asked_for_is_not_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    with monkeypatch.context() as patches:
        patches.setattr(store, "write", no_space)
        future = checkpoints.async_save(tmp_path / "step_1", model=filled(1.0))
        if asked == "exception":
            assert isinstance(future.exception(), OSError)
        else:
            with pytest.raises(OSError, match="No space left"):
                future.result()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints.save(tmp_path / "step_2", model=filled(2.0))


def test_who_asked_too_early_was_told_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    with monkeypatch.context() as patches:
        patches.setattr(store, "write", lambda *args: (go.wait(), no_space()))
        future = checkpoints.async_save(tmp_path / "step_1", model=filled(1.0))
        for ask in (future.result, future.exception):
            with pytest.raises(TimeoutError):
                ask(timeout=0)
        go.set()
        wait([future])
    with pytest.warns(RuntimeWarning, match="step_1 by an async_save"):
        checkpoints.save(tmp_path / "step_2", model=filled(2.0))


# -- failures of the disk ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [save_now, save_later])
@pytest.mark.parametrize(("free", "said"), [(3 * 2**20, True), (2**40, False)])
def test_a_failed_save_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Path, nn.Module], None], free: int, said: bool
) -> None:
    path = tmp_path / "step_1"
    checkpoints.save(path, model=filled(1.0))
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    with monkeypatch.context() as patches:
        patches.setattr(saving.Manifest, "write", no_space)
        patches.setattr(shutil, "disk_usage", lambda _: usage)
        for place in (path, tmp_path / "step_2"):
            with pytest.raises(checkpoints.CheckpointError, match="No space left on device") as caught:
                call(place, filled(2.0))
            remedy = f"; 3.0 MiB are free where {place} would lie: make room there, or save elsewhere"
            assert str(caught.value).endswith(remedy) == said and ("free" in str(caught.value)) == said
    assert [place.name for place in tmp_path.iterdir()] == ["step_1"]
    assert first_value(path) == 1.0


def test_a_file_that_torch_could_not_end_is_told_with_what_may_be_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        raise checkpoints.CheckpointError(
            "rank 1: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"
        )

    monkeypatch.setattr(store, "write", write)
    usage = shutil.disk_usage(tmp_path)._replace(free=2**40)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(checkpoints.CheckpointError, match="unexpected pos 704 .* a quota, .* make room in it"):
        checkpoints.save(tmp_path / "step_1", model=filled(1.0))
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_is_refused_removes_nothing(tmp_path: Path) -> None:
    for name in ("step_1", ".step_1.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").touch()
    with pytest.raises(checkpoints.CheckpointError, match="is no checkpoint"):
        checkpoints.save(tmp_path / "step_1", model=filled(1.0))
    assert len(list(tmp_path.glob("*step_1*/notes"))) == 2 and (tmp_path / ".step_1.tmp" / "notes").exists()


# -- where it is written -------------------------------------------------------------------------------------------


def test_a_link_is_followed(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "real", model=filled(0.0))
    (tmp_path / "link").symlink_to("real")
    for value in (1.0, 2.0, 3.0):
        checkpoints.save(tmp_path / "link", model=filled(value))
        assert first_value(tmp_path / "real") == value
    assert (tmp_path / "link").is_symlink()
    assert {place.name for place in tmp_path.iterdir()} == {"real", "link"}
    (tmp_path / "real").rename(tmp_path / ".real.old")  # interrupted between two renames
    assert first_value(tmp_path / "link") == 3.0


def test_a_link_to_what_is_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away")
    checkpoints.save(tmp_path / "link", model=filled(1.0))
    assert first_value(tmp_path / "far" / "away") == 1.0


@pytest.mark.parametrize("path", [".", "..", "a/..", "/", ""])
@pytest.mark.parametrize("call", [checkpoints.save, checkpoints.async_save])
def test_a_path_without_a_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, call: Callable[..., object]
) -> None:
    (tmp_path / "here" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(checkpoints.CheckpointError, match="got a path that ends in no name, wanted .* run/step_000100"):
        call(path, model=filled(1.0))
    assert [place.name for place in tmp_path.rglob("*")] == ["here", "a"]


def test_a_checkpoint_is_loaded_from_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.save(tmp_path / "c", model=filled(1.0))
    monkeypatch.chdir(tmp_path / "c")
    assert first_value(Path(".")) == 1.0


def test_the_working_directory_of_the_call_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    go = threading.Event()
    original = store.write
    monkeypatch.setattr(store, "write", lambda *args: (go.wait(), original(*args)))
    monkeypatch.chdir(tmp_path / "first")
    future = checkpoints.async_save("step_1", model=filled(1.0))
    monkeypatch.chdir(tmp_path / "second")
    go.set()
    assert future.result() is None
    assert first_value(tmp_path / "first" / "step_1") == 1.0


# -- beside the model ----------------------------------------------------------------------------------------------


def test_extra_keeps_its_order(tmp_path: Path) -> None:
    extra = {"z": 1, "a": {"y": 2, "b": {"2": 0, "10": 0, "1": torch.ones(2)}}, "m": [{"k": 0, "c": 0}]}
    checkpoints.save(tmp_path / "c", model=filled(1.0), extra=extra)
    got = checkpoints.load(tmp_path / "c", model=filled(0.0))
    assert repr(got) == repr(extra)
