"""Worker processes for distributed tests, started once per world size and used by all tests of a session.

    def all_reduced(rank, world, scale):            # at the top of the test module
        x = torch.full((2,), float(rank), device=testing.device())
        dist.all_reduce(x)
        return x * scale

    def test_all_reduce_sums():
        assert [x.tolist() for x in pool(2).run(all_reduced, 3.0)] == [[3.0, 3.0]] * 2

[Note: starting workers]
Workers are forked from a server process that has imported torch and te_dist and done nothing else (no thread, no CUDA
context), so the import is paid once per session and a new worker costs milliseconds. That is why every failure simply
ends all ranks of its pool: the next call starts clean ones, and no half-done collective can reach another test.

[Note: resting pools]
Gloo has a thread for each process group, which wakes a hundred times a second. Of several pools of a session, all but
the one that was called last are therefore stopped (SIGSTOP) until their next call; where this process ends without
closing them, the system lets them go on to their end. Ranks on GPUs are not stopped: NCCL watches its threads by the
clock.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

import torch

from te_dist import env
from te_dist.testing.worker import Failure, Job, Setup, Success, serve

TIMEOUT = 60.0  # seconds, of a call and of a collective
GRACE = 3.0  # seconds for the other ranks to answer once one has failed

_PRELOAD = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint", "pytest", "te_dist")


class RankError(RuntimeError):
    """A rank died, or did not finish in time."""


@dataclass(frozen=True)
class Death:
    """A rank whose process ended during a call."""

    exitcode: int | None
    stacks: str


@dataclass(frozen=True)
class Hang:
    """A rank that was still running when the time was up."""

    stacks: str


Outcome = Success | Failure | Death | Hang


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    stack_path: Path


class WorkerPool:
    """`world` processes in one process group: gloo on "cpu", NCCL on "cuda" (rank i on GPU i).

    Where there are fewer GPUs, ranks share them in turn, which NCCL has to be told (`env.SHARED_GPUS`).
    """

    _awake: ClassVar[WorkerPool | None] = None  # the one that was called last

    def __init__(self, world: int, device_type: str = "cpu", *, timeout: float = TIMEOUT) -> None:
        self.world = world
        self.device_type = device_type
        self.timeout = timeout
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Calls `fn(rank, world, *args)` on every rank, each from the same seed.

        Args:
            fn: module-level function. Inside, `testing.device()` and `testing.mesh(shape, names)` serve the rank.
            args: picklable arguments, the same for all ranks; tensors travel by value.
            timeout: seconds for this call, where the pool's own do not fit.

        Returns:
            What each rank returned, in rank order.

        Raises:
            RankError: a rank died or did not finish in time; the message tells which and shows its stacks.
            RuntimeError: there are fewer GPUs than ranks, and NCCL is not told to let them share.
            Exception: whatever the first failing rank raised, with the ranks and tracebacks as notes.
        """
        limit = self.timeout if timeout is None else timeout
        message = pickle.dumps(Job.of(fn, args))
        if any(worker.connection.poll() for worker in self._workers):
            self._kill()  # an idle worker has nothing to say: its end of the pipe was closed by its death
        self._wake()
        try:
            if not self._workers:
                self._start()
            for worker in self._workers:
                _send(worker, message)
            outcomes = self._collect(limit)
        except BaseException:  # Ctrl-C, say: nobody waits for what ranks are at
            self._kill()
            raise
        successes = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Success)}
        if len(successes) == self.world:
            return [successes[rank].result for rank in range(self.world)]
        self._kill()
        raise _error_of(outcomes, fn.__qualname__, limit)

    def close(self) -> None:
        """Asks all workers to leave. The next call starts new ones."""
        for worker in self._workers:
            _send(worker, b"")
        deadline = time.monotonic() + GRACE
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _wake(self) -> None:
        """From now on this pool is the one that does not rest, see [Note: resting pools]."""
        before, WorkerPool._awake = WorkerPool._awake, self
        if before is not None and before is not self and before.device_type == "cpu":
            for worker in before._workers:
                _signal(worker, signal.SIGSTOP)

    def _kill(self) -> None:
        """Ends all workers, whatever they are doing."""
        workers, self._workers = self._workers, []
        if WorkerPool._awake is self:
            WorkerPool._awake = None
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        """Forks the workers; they join their process group on their own."""
        if self.device_type == "cuda" and (missing := lacking_gpus(self.world)):
            raise RuntimeError(f"a pool of {self.world} ranks on GPUs {missing}")
        _STARTED.add(self)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOAD, serve.__module__])
        self._folder = tempfile.TemporaryDirectory(prefix="te_dist_pool_")
        folder = Path(self._folder.name)
        for rank in range(self.world):
            stacks = folder / f"stacks_{rank}"
            setup = Setup(rank, self.world, self.device_type, str(folder / "store"), str(stacks), self.timeout)
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(setup, theirs), name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, stacks))

    def _collect(self, limit: float) -> dict[int, Outcome]:
        """Outcomes by rank, in order of arrival. After a first failure the others have `GRACE` seconds left."""
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + limit
        pending = dict(enumerate(self._workers))
        while pending and (remaining := deadline - time.monotonic()) > 0:
            ready = wait([w.connection for w in pending.values()], remaining)
            for rank in [rank for rank, worker in pending.items() if worker.connection in ready]:
                outcomes[rank] = _receive(pending.pop(rank))
                if not isinstance(outcomes[rank], Success):
                    deadline = min(deadline, time.monotonic() + GRACE)
        return outcomes | {rank: Hang(_stacks_of(worker)) for rank, worker in pending.items()}


def lacking_gpus(world: int) -> str:
    """What `world` ranks lack; empty where each has a GPU, or NCCL is told to let them share (`env.SHARED_GPUS`)."""
    found = torch.cuda.device_count()
    if found >= world or (found and env.SHARED_GPUS.get()):
        return ""
    shared = f"; NCCL from 2.30 lets ranks share one where {env.SHARED_GPUS.name}=1" if found else ""
    return f"needs {world} GPUs, this machine has {found}{shared}"


_POOLS: dict[tuple[int, str], WorkerPool] = {}
_STARTED: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def pool(world: int, device_type: str = "cpu") -> WorkerPool:
    """The session's pool of this world size and device type ("cpu" or "cuda")."""
    return _POOLS.setdefault((world, device_type), WorkerPool(world, device_type))


@atexit.register
def close_pools() -> None:
    """Ends the workers of all pools: the interpreter would wait forever for those that rest."""
    for each in list(_STARTED):
        each.close()


def _signal(worker: _Worker, number: signal.Signals) -> None:
    """To a worker that may be dead already."""
    if worker.process.is_alive() and worker.process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, number)


def _send(worker: _Worker, message: bytes) -> None:
    """Sends to a worker that may rest, or be dead already; its end is then found when its answer is awaited."""
    _signal(worker, signal.SIGCONT)
    try:
        worker.connection.send_bytes(message)
    except OSError:
        return


def _receive(worker: _Worker) -> Outcome:
    """The answer that is ready, or the death of the worker: its end of the pipe closes with it."""
    try:
        return pickle.loads(worker.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        worker.process.join(1.0)
        return Death(worker.process.exitcode, worker.stack_path.read_text())


def _stacks_of(worker: _Worker) -> str:
    """Python stacks of a running worker, which writes them on SIGUSR1."""
    assert worker.process.pid is not None
    os.kill(worker.process.pid, signal.SIGUSR1)
    seen, deadline = "", time.monotonic() + 1.0
    while time.monotonic() < deadline:
        time.sleep(0.05)
        text = worker.stack_path.read_text()
        if text and text == seen:
            break
        seen = text
    return seen


def _error_of(outcomes: dict[int, Outcome], name: str, limit: float) -> BaseException:
    """What to raise. A death goes before an exception, since it makes other ranks raise; both before a hang."""
    deaths = {rank: o for rank, o in outcomes.items() if isinstance(o, Death)}
    failures = {rank: o for rank, o in outcomes.items() if isinstance(o, Failure)}
    hangs = {rank: o for rank, o in outcomes.items() if isinstance(o, Hang)}
    summary = f"{name} over {len(outcomes)} ranks: " + "; ".join(_describe(r, outcomes[r]) for r in sorted(outcomes))
    if deaths:
        rank = next(iter(deaths))
        error = RankError(f"rank {rank} died ({_ending(deaths[rank])}) in {summary}")
    elif failures:
        rank = next(iter(failures))
        error = failures[rank].exception
        error.add_note(f"raised by rank {rank} first in {summary}")
    else:
        error = RankError(f"ranks {sorted(hangs)} did not finish within {limit:g} s in {summary}")
    for rank, failure in failures.items():
        error.add_note(f"rank {rank}:\n{failure.trace}")
    for rank, outcome in (deaths | hangs).items():
        error.add_note(f"stacks of rank {rank}:\n{outcome.stacks or '(none written)'}")
    return error


def _ending(death: Death) -> str:
    """An exit code in words."""
    if death.exitcode is not None and death.exitcode < 0:
        return f"signal {signal.Signals(-death.exitcode).name}"
    return f"exit code {death.exitcode}"


def _describe(rank: int, outcome: Outcome) -> str:
    """One rank's part of the summary."""
    match outcome:
        case Success():
            return f"rank {rank} finished"
        case Failure(exception):
            return f"rank {rank} raised {type(exception).__name__}"
        case Death():
            return f"rank {rank} died ({_ending(outcome)})"
        case Hang():
            return f"rank {rank} was still running and was ended"
