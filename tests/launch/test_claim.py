"""Who may write in a run directory: one run at a time, and later attempts of one launch."""

import errno
import fcntl
import os
import resource
import signal
import socket
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
    """Sets the environment of an attempt of a launch, and which process started it."""
    own = os.getppid()

    def launch(number: int, name: str = "job", *, by: int = own) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        monkeypatch.setattr(os, "getppid", lambda: by)

    return launch


def goes_on(config: Config, *, begins: bool = True) -> bool:
    """Of an attempt that takes the directory, whether it goes on with an earlier one; `begins`: whether it may run."""
    with claimed(World(dist.HashStore(), 0, 1), config) as held:
        if begins:
            held.begin()
    return held.goes_on


def released_behind(config: Config, first: Claim) -> Claim:
    """The claim of a second run, which takes the directory while a first one has it still for half a second."""
    timer = threading.Timer(0.5, first.release)
    timer.start()
    started = time.monotonic()
    try:
        with claimed(World(dist.HashStore(), 0, 1), config) as second:
            assert time.monotonic() - started > 0.3
            return second
    finally:
        timer.join()


def test_a_second_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    config, world = Config(run_dir=str(tmp_path / "run")), World(dist.HashStore(), 0, 1)
    said = r"run: got one that another run writes in \(process \d+ on .*another run_dir"
    with claimed(world, config), pytest.raises(JobError, match=said), claimed(world, config):
        pass
    with claimed(world, config) as again:
        assert not again.warning


def test_an_attempt_waits_for_the_processes_of_the_one_before(tmp_path: Path, attempt: Callable) -> None:
    config = Config(run_dir=str(tmp_path))
    first = Claim(config)
    first.take()
    attempt(1)
    released_behind(config, first)


@pytest.mark.parametrize("gone", ["host", "process"])
def test_a_run_waits_for_the_lock_of_one_that_is_not_seen_to_live(
    gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another host, or a container before this one whose process had a number that another process has by now."""
    config = Config(run_dir=str(tmp_path))
    first = Claim(config)
    with monkeypatch.context() as patch:
        if gone == "host":
            patch.setattr(socket, "gethostname", lambda: "node-7")
        else:
            patch.setattr(os, "getpid", os.getppid)
            patch.setattr(claim, "STARTED", 0)
        first.take()
        holder = f"(process {os.getpid()} on {socket.gethostname()})"
    released_behind(config, first)
    assert capsys.readouterr().out == f"{tmp_path}: waits up to 120 s for another run {holder}\n"


def test_a_run_does_not_wait_longer_than_its_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(run_dir=str(tmp_path), timeout_seconds=1)
    first = Claim(config)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "node-7")
        first.take()
    with pytest.raises(JobError, match=r"another run writes in \(process \d+ on node-7\)"):
        Claim(config).take()
    first.release()


def test_a_lock_that_cannot_be_written_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with (
            pytest.raises(JobError, match="File too large.*make room there"),
            claimed(World(dist.HashStore(), 0, 1), Config(run_dir=str(tmp_path))),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, held)


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


def test_a_launch_of_the_same_name_goes_on_with_nothing_when_its_first_attempt_never_came_here(
    tmp_path: Path, attempt: Callable
) -> None:
    config, another = Config(run_dir=str(tmp_path)), os.getpid()
    attempt(0, by=another)
    assert not goes_on(config)
    attempt(1)
    assert not goes_on(config, begins=False)
    attempt(1, by=another)
    assert not goes_on(config)  # what it had begun is no longer known to be alone here
    attempt(2, by=another)
    assert goes_on(config)


def test_an_attempt_goes_on_with_nothing_where_no_process_can_be_told_from_others(
    tmp_path: Path, attempt: Callable
) -> None:
    config = Config(run_dir=str(tmp_path))
    nobody = 2**22 + 1  # no process has so high a number
    attempt(0, by=nobody)
    assert not goes_on(config)
    attempt(1, by=nobody)
    assert not goes_on(config)
