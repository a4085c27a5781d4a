"""One run at a time in a run directory: rank 0 holds a lock on a file there, which the kernel lets go when it dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from uuid import uuid4

from te_dist import env
from te_dist.launch.config import Config
from te_dist.launch.errors import JobError, unwritable
from te_dist.launch.world import World

LOCK = "lock"
PATIENCE = 120.0  # seconds, while a file server may still keep the lock of a host that is gone: NFS does for about 90
DYING = 10.0  # seconds, while processes of the attempt before may still be dying
PAUSE = 0.2  # seconds
STARTED = 19  # field of /proc/<process>/stat behind the name: when it started, in ticks since the host did


class Claim:
    """A run directory that is this run's; on other ranks than 0 it holds nothing.

    Args:
        is_later: whether `torchrun` has started processes of this launch again, on any node.

    Attributes:
        goes_on: whether an earlier attempt of the same launch began the run here.
        warning: what to say of a file system without locks; "" elsewhere.
    """

    goes_on: bool
    warning: str

    def __init__(self, config: Config, *, is_later: bool = False) -> None:
        self.goes_on = False
        self.warning = ""
        self._run_dir = config.run_dir
        self._is_later = is_later
        self._longest = config.timeout_seconds
        self._file: FileIO | None = None

    def take(self) -> str:
        """Takes the directory and returns the warning.

        Raises:
            JobError: another run has it, or it cannot be written.
        """
        try:
            Path(self._run_dir).mkdir(parents=True, exist_ok=True)
            # Without a buffer: what it could not write it would write, and fail, once more when it is closed.
            self._file = Path(self._run_dir, LOCK).open("a+b", buffering=0)  # noqa: SIM115  (`release` closes it)
            self._lock(self._file)
            # A first attempt goes on with nothing, whatever was begun here before.
            self.goes_on = self._is_later and self._read().get("launch") == _launch()
            self._write(_launch() if self.goes_on else None)
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
            with suppress(OSError):  # some file systems tell only now that they had no room
                self._file.close()
            self._file = None

    def _lock(self, file: FileIO) -> None:
        started, waits = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                patience = self._patience()
                if time.monotonic() - started >= patience:
                    raise self._taken() from error
                if not waits:
                    waits = True
                    print(f"{self._run_dir}: waits up to {patience:.0f} s for another run{self._holder()}", flush=True)
                time.sleep(PAUSE)
            except OSError as error:
                self.warning = (
                    f"{self._run_dir} cannot be locked ({error.strerror}): see that no other run has the same run_dir"
                )
                return
            else:
                return

    def _patience(self) -> float:
        """How long to wait for the lock, in seconds: not for a process that is seen to live, unless it may be dying."""
        found = self._read()
        process = found.get("process")
        lives = isinstance(process, int) and _who(process).items() <= found.items()
        may_die = self._is_later or env.MAX_RESTARTS.get() > 0
        return min((DYING if may_die else 0.0) if lives else PATIENCE, self._longest)

    def _holder(self) -> str:
        found = self._read()
        return f" (process {found['process']} on {found['host']})" if found.keys() >= {"process", "host"} else ""

    def _taken(self) -> JobError:
        return JobError(
            f"run directory {self._run_dir}",
            got=f"one that another run writes in{self._holder()}",
            wanted="a run directory for each run",
            remedy="set another run_dir, or wait until that run has ended",
        )

    def _read(self) -> dict[str, object]:
        """What the latest run wrote; nothing where it was stopped meanwhile."""
        assert self._file is not None
        self._file.seek(0)
        with suppress(ValueError):
            found = json.loads(self._file.readall())
            return found if isinstance(found, dict) else {}
        return {}

    def _write(self, launch: dict[str, object] | None) -> None:
        assert self._file is not None
        self._file.truncate(0)
        self._file.write(json.dumps({**_who(os.getpid()), "launch": launch}).encode())


@contextmanager
def claimed(world: World, config: Config) -> Iterator[Claim]:
    """Has the run directory for this run alone.

    Raises:
        JobError: on every rank alike; another run has it, or it cannot be written.
    """
    claim = Claim(config, is_later=world.any(env.RESTARTS.get() > 0))
    try:
        claim.warning = world.share(claim.take)
        yield claim
    finally:
        claim.release()


def _launch() -> dict[str, object]:
    """The `torchrun` that started this process, which all its attempts on this node have in common.

    Its name alone would not do: a script gives the same to each of its launches.
    """
    return {"name": env.LAUNCH.get(), **_who(os.getppid())}


def _who(process: int) -> dict[str, object]:
    """A process of this host, told from those that have its number before and after it."""
    try:
        behind_name = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2]
        started = behind_name.split()[STARTED].decode()
    except OSError:  # it has ended, or there is no such file system: it is like no other one, itself included
        started = uuid4().hex
    return {"host": socket.gethostname(), "process": process, "started": started}
