"""The child's side of `te_dist.testing.pool`: one rank that runs the functions it is sent, and what they may ask it."""

from __future__ import annotations

import faulthandler
import fcntl
import functools
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Setup:
    """What a rank needs to join its process group.

    Attributes:
        rank, world: place of this process.
        device_type: "cpu" (gloo) or "cuda" (NCCL, and gloo for CPU tensors).
        store_path: file of the rendezvous store, the same for all ranks.
        stack_path: file into which the stacks of all threads go on SIGUSR1 and on a crash.
        timeout: seconds after which a collective gives up.
    """

    rank: int
    world: int
    device_type: str
    store_path: str
    stack_path: str
    timeout: float


@dataclass(frozen=True)
class Job:
    """A function call as sent to a rank: the function by place and name, so that any import mode of pytest works."""

    module: str
    file: str
    function: str
    arguments: bytes  # pickled after the module is known, since it may define their classes
    search_path: tuple[str, ...]

    @staticmethod
    def of(fn: Callable[..., Any], args: tuple[Any, ...]) -> Job:
        """Packs `fn(rank, world, *args)`; `fn` must be defined at the top of a module."""
        if "<" in fn.__qualname__:
            raise ValueError(f"{fn.__qualname__} is no module-level function, so workers cannot find it; move it there")
        file = sys.modules[fn.__module__].__file__ or ""
        root = str(
            Path(file).parents[fn.__module__.count(".")]
        )  # where `tests.helper` is found, whoever started pytest
        return Job(fn.__module__, file, fn.__qualname__, pickle.dumps(args), (*sys.path, root))

    def call(self, rank: int, world: int) -> Any:
        """Runs the function in this process."""
        sys.path[:] = self.search_path
        fn: Any = functools.reduce(getattr, self.function.split("."), _load(self.module, self.file))
        return fn(rank, world, *pickle.loads(self.arguments))


@dataclass(frozen=True)
class Success:
    """What the function returned."""

    result: Any


@dataclass(frozen=True)
class Failure:
    """What the function raised, and where."""

    exception: BaseException
    trace: str


def device() -> torch.device:
    """The device of this rank."""
    on_gpu = "nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


@functools.cache
def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The device mesh of this shape. Made once per worker: every new one would leave process groups behind."""
    return init_device_mesh(device().type, shape, mesh_dim_names=names)


def serve(setup: Setup, connection: Connection) -> None:
    """Entry of a worker: joins the group, then answers jobs until the parent hangs up or sends an empty message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _go_on_when_left(connection)
    with open(setup.stack_path, "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        try:
            _join(setup)
        except Exception as error:
            connection.send_bytes(_pack_failure(error))
            return
        gc.freeze()
        known = len(sys.modules)
        try:
            while message := connection.recv_bytes():
                connection.send_bytes(_answer(setup, message))
                gc.collect()
                if len(sys.modules) != known:  # modules stay: not to be looked at after every job
                    known = len(sys.modules)
                    gc.freeze()
        except EOFError:
            return
        if dist.is_initialized():
            dist.destroy_process_group()


def _go_on_when_left(connection: Connection) -> None:
    """Lets the system continue this process, if it is stopped, when the parent hangs up: it would stay forever."""
    file = connection.fileno()
    fcntl.fcntl(file, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGCONT)
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_ASYNC)


def _join(setup: Setup) -> None:
    """Joins the process group over a file store: no port is taken for the rendezvous."""
    torch.set_num_threads(1)
    on_gpu = setup.device_type == "cuda"
    if on_gpu:
        torch.cuda.set_device(setup.rank % torch.cuda.device_count())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.FileStore(setup.store_path, setup.world),  # pyright: ignore[reportPrivateImportUsage]
        rank=setup.rank,
        world_size=setup.world,
        timeout=timedelta(seconds=setup.timeout),
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else None,
    )


def _answer(setup: Setup, message: bytes) -> bytes:
    """Runs one job from a fixed seed and packs its outcome."""
    torch.manual_seed(0)
    try:
        return pickle.dumps(Success(pickle.loads(message).call(setup.rank, setup.world)))
    except (Exception, SystemExit) as error:
        return _pack_failure(error)


def _pack_failure(error: BaseException) -> bytes:
    """Packs an exception with its traceback; one that does not survive pickling is replaced by its text."""
    trace = "".join(traceback.format_exception(error))
    try:
        packed = pickle.dumps(Failure(error, trace))
        pickle.loads(packed)
    except Exception:
        packed = pickle.dumps(Failure(RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return packed


def _load(name: str, file: str) -> ModuleType:
    """The module `name`, from `file` where the import system does not find that very file."""
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == file:
        return loaded
    try:
        found = importlib.util.find_spec(name) if loaded is None else None
    except ModuleNotFoundError:
        found = None
    if found is not None and found.origin == file:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
