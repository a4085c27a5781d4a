"""Who may write in a run directory: one run at a time, and later attempts of one launch."""

import errno
import fcntl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from te_dist.launch import claim
from te_dist.launch.claim import Claim, claimed
from te_dist.launch.config import Config
from te_dist.launch.errors import JobError
from te_dist.launch.world import World


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the environment of an attempt of a launch."""

    def launch(number: int, name: str = "job") -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))

    return launch


def goes_on(config: Config, *, begins: bool = True) -> bool:
    """Of an attempt that takes the directory, whether it goes on with an earlier one; `begins`: whether it may run."""
    held = Claim(config)
    held.take()
    if begins:
        held.begin()
    held.release()
    return held.goes_on


def test_a_second_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    config, world = Config(run_dir=str(tmp_path / "run")), World(dist.HashStore(), 0, 1)
    said = r"run: got one that another run writes in \(process \d+ on .*another run_dir"
    with claimed(world, config), pytest.raises(JobError, match=said), claimed(world, config):
        pass
    with claimed(world, config) as again:
        assert not again.warning


def test_an_attempt_waits_for_the_processes_of_the_one_before(tmp_path: Path, attempt: Callable) -> None:
    first, second = (Claim(Config(run_dir=str(tmp_path))) for _ in range(2))
    first.take()
    attempt(1)
    timer = threading.Timer(0.5, first.release)
    timer.start()
    started = time.monotonic()
    second.take()
    assert time.monotonic() - started > 0.3
    second.release()
    timer.join()


def test_a_file_system_without_locks_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with claimed(World(dist.HashStore(), 0, 1), Config(run_dir=str(tmp_path))) as held:
        assert "cannot be locked (No locks available)" in held.warning
        assert (tmp_path / claim.LOCK).exists()


def test_only_later_attempts_of_the_launch_that_began_a_run_go_on_with_it(tmp_path: Path, attempt: Callable) -> None:
    config = Config(run_dir=str(tmp_path))
    attempt(0)
    assert not goes_on(config)
    attempt(1)
    assert goes_on(config)
    attempt(1, "another")
    assert not goes_on(config, begins=False)
    attempt(1)
    assert not goes_on(config)  # another one was here in between


def test_a_launch_that_was_refused_at_first_is_refused_when_it_is_started_again(
    tmp_path: Path, attempt: Callable
) -> None:
    config = Config(run_dir=str(tmp_path))
    attempt(0)
    assert not goes_on(config)
    assert not goes_on(config, begins=False)  # the same name, taken once more
    attempt(1)
    assert not goes_on(config, begins=False)
