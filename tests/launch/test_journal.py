"""The record of a run across its starts."""

import os
from pathlib import Path

import pytest
from matplotlib.axes import Axes

from te_dist.launch.journal import METRICS, Journal

KEPT = '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n'


def started(folder: Path, text: str, step: int = 2) -> Journal:
    """A journal that went on from a step, with these metrics before."""
    (folder / METRICS).write_text(text)
    journal = Journal(folder, 4, writes=True)
    journal.start(step, "{}")
    return journal


@pytest.mark.parametrize(
    "rest",
    ['{"step": 3, "loss": 1.0}\n', '{"step": 3, "lo', '{"step": 1, "lo\n', "\0\0\n", "7\n", '{"loss": 1.0}\n'],
    ids=["later", "without an end", "torn", "zeros", "no record", "no step"],
)
def test_later_and_damaged_lines_are_dropped(tmp_path: Path, rest: str) -> None:
    journal = started(tmp_path, KEPT + rest)
    assert (tmp_path / METRICS).read_text() == KEPT
    journal.record(3, loss=1.5)
    assert (tmp_path / METRICS).read_text() == KEPT + '{"step": 3, "loss": 1.5}\n'


def test_a_damaged_line_does_not_keep_the_loss_from_being_drawn(tmp_path: Path) -> None:
    journal = started(tmp_path, KEPT)
    (tmp_path / METRICS).write_text("{\n" + KEPT)
    journal.draw(5.0)
    assert (tmp_path / "loss.png").exists()


def test_metrics_that_are_kept_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text(KEPT)
    before = (tmp_path / METRICS).stat()
    Journal(tmp_path, 4, writes=True).start(2, "{}")
    after = (tmp_path / METRICS).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_kill_while_lines_are_dropped_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def die(draft: Path, target: Path) -> None:
        if target.name == METRICS:
            raise KeyboardInterrupt
        replace(draft, target)

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        started(tmp_path, KEPT, step=1)
    assert (tmp_path / METRICS).read_text() == KEPT


def test_an_equal_line_is_written_once(tmp_path: Path) -> None:
    journal = started(tmp_path, KEPT)
    journal.record(2, loss=2.0)
    assert (tmp_path / METRICS).read_text() == KEPT


def test_of_several_losses_of_a_step_the_newest_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = started(tmp_path, KEPT)
    for loss in (2.5, 2.25):
        journal.record(2, validation_loss=loss, unigram_loss=5.0)
    drawn = []
    monkeypatch.setattr(Axes, "plot", lambda self, *args, **options: drawn.append(args[:2]))
    monkeypatch.setattr(Axes, "legend", lambda self: None)
    journal.draw(5.0)
    assert drawn == [([1, 2], [3.0, 2.0]), ([2], [2.25])]


def test_lines_that_are_dropped_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started(tmp_path, KEPT, step=0)
    assert capsys.readouterr().out == f"2 lines of {METRICS} are dropped: damaged, or of steps behind 0\n"
    started(tmp_path, KEPT)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("name", ["run[seed=1]", "run[/b]", "r" * 200])
def test_paths_are_told_as_they_are(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Journal(tmp_path, 4, writes=True).note(name)
    assert capsys.readouterr().out == name + "\n"


def test_a_picture_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = started(tmp_path, KEPT)
    (tmp_path / "loss.png").mkdir()
    journal.draw(5.0)
    assert capsys.readouterr().out.startswith("no picture of the loss: ")
