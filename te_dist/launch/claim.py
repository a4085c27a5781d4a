"""One run at a time in a run directory: rank 0 holds a lock on a file there, which the kernel lets go when it dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from te_dist import env
from te_dist.launch.config import Config
from te_dist.launch.errors import JobError, unwritable
from te_dist.launch.world import World

LOCK = "lock"
PATIENCE = 10.0  # seconds, while processes of the attempt before may still be dying
PAUSE = 0.2  # seconds
NAMELESS = "none"  # what torchrun calls a launch without --rdzv-id


class Claim:
    """A run directory that is this run's; on other ranks than 0 it holds nothing.

    Attributes:
        goes_on: whether an earlier attempt of the same launch began the run here.
        warning: what to say of a file system without locks; "" elsewhere.
    """

    goes_on: bool
    warning: str

    def __init__(self, config: Config) -> None:
        self.goes_on = False
        self.warning = ""
        self._run_dir = config.run_dir
        self._patience = min(PATIENCE, config.timeout_seconds)
        self._file: TextIO | None = None

    def take(self) -> str:
        """Takes the directory and returns the warning.

        Raises:
            JobError: another run has it, or it cannot be written.
        """
        try:
            Path(self._run_dir).mkdir(parents=True, exist_ok=True)
            self._file = Path(self._run_dir, LOCK).open("a+")  # noqa: SIM115  (`release` closes it)
            self._lock(self._file)
            # A first attempt goes on with nothing, whatever an earlier launch of the same name left.
            self.goes_on = env.RESTARTS.get() > 0 and self._read().get("launch") == _launch()
            self._write(_launch() if self.goes_on else "")
        except OSError as error:
            raise unwritable(self._run_dir, error) from error
        return self.warning

    def begin(self) -> None:
        """Notes that this launch has begun a run here, which its later attempts go on with."""
        try:
            self._write(_launch())
        except OSError as error:
            raise unwritable(self._run_dir, error) from error

    def release(self) -> None:
        """Lets another run have it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lock(self, file: TextIO) -> None:
        may_wait = env.RESTARTS.get() > 0 or env.MAX_RESTARTS.get() > 0
        deadline = time.monotonic() + (self._patience if may_wait else 0.0)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                if time.monotonic() >= deadline:
                    raise self._taken() from error
                time.sleep(PAUSE)
            except OSError as error:
                self.warning = (
                    f"{self._run_dir} cannot be locked ({error.strerror}): see that no other run has the same run_dir"
                )
                return
            else:
                return

    def _taken(self) -> JobError:
        found = self._read()
        holder = f" (process {found['process']} on {found['host']})" if found.keys() >= {"process", "host"} else ""
        return JobError(
            f"run directory {self._run_dir}",
            got=f"one that another run writes in{holder}",
            wanted="a run directory for each run",
            remedy="set another run_dir, or wait until that run has ended",
        )

    def _read(self) -> dict[str, object]:
        """What the latest run wrote; nothing where it was stopped meanwhile."""
        assert self._file is not None
        self._file.seek(0)
        with suppress(ValueError):
            found = json.loads(self._file.read())
            return found if isinstance(found, dict) else {}
        return {}

    def _write(self, launch: str) -> None:
        assert self._file is not None
        self._file.truncate(0)
        self._file.write(json.dumps({"host": socket.gethostname(), "process": os.getpid(), "launch": launch}))
        self._file.flush()


@contextmanager
def claimed(world: World, config: Config) -> Iterator[Claim]:
    """Has the run directory for this run alone.

    Raises:
        JobError: on every rank alike; another run has it, or it cannot be written.
    """
    claim = Claim(config)
    try:
        claim.warning = world.share(claim.take)
        yield claim
    finally:
        claim.release()


def _launch() -> str:
    """What all attempts of one `torchrun` have in common, and those of another one have not."""
    name = env.LAUNCH.get()
    return f"{socket.gethostname()}, process {os.getppid()}" if name == NAMELESS else name
