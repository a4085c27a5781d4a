"""A tiny job: text made here, a decoder of two narrow blocks, a few steps; run in this process or under torchrun."""

from __future__ import annotations

import json
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from te_dist.testing import WorkerPool

REPOSITORY = Path(__file__).parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
MODULE = ("-m", "te_dist.launch.train")
WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "owls",
    "count",
    "stars",
)
TINY = """\
recipe = "{recipe}"
run_dir = "{run_dir}"
device = "cpu"
timeout_seconds = 30

[model]
vocab_size = 320
hidden = 64
ffn = 128
layers = 2
heads = 4
kv_heads = 2

[data]
files = ["{text}/*.txt"]
exclude = []
sequence_length = 32
validation_fraction = 0.2

[train]
steps = 8
batch = 8
micro_batch = 2
log_every = 1

[optimizer]
warmup_steps = 2

[evaluation]
every = 4
sequences = 8

[checkpoint]
every = 4
"""


@dataclass(frozen=True)
class TinyJob:
    """A configuration file and the run directory it names."""

    path: Path
    run_dir: Path

    def command(self, *overrides: str) -> list[str]:
        """The entry module and its arguments."""
        return [*MODULE, str(self.path), *overrides]

    def metrics(self, key: str) -> dict[int, float]:
        """Values of `metrics.jsonl` by step."""
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return {record["step"]: record[key] for record in map(json.loads, lines) if key in record}


@dataclass
class Launcher:
    """Starts processes and ends those that a failing test left behind."""

    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A `torchrun` with these arguments; stdout and stderr come as one text."""
        process = subprocess.Popen(
            [*TORCHRUN, *arguments], cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.started.append(process)
        return process


@contextmanager
def written_to(path: str) -> Iterator[None]:
    """What this process prints goes into a file, also what is printed past Python."""
    kept = [os.dup(number) for number in (1, 2)]
    with open(path, "w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, old in enumerate(kept, start=1):
                os.dup2(old, number)
                os.close(old)


def run_as_launched(rank: int, world: int, port: int, arguments: tuple[str, ...]) -> tuple[int, str]:
    """Runs `-m module ...` or `script ...` as torchrun would have it run; its exit code and what it printed."""
    if dist.is_initialized():
        dist.destroy_process_group()  # of the pool, or what a failed job has left
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    given |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    module = arguments[1] if arguments[0] == "-m" else None
    with pytest.MonkeyPatch.context() as patch, tempfile.NamedTemporaryFile() as log:
        for name, value in given.items():
            patch.setenv(name, str(value))
        patch.setattr(sys, "argv", list(arguments[1 if module else 0 :]))
        code = 0
        with written_to(log.name):
            try:
                if module:
                    runpy.run_module(module, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(arguments[0], run_name="__main__")
            except SystemExit as end:
                code = int(end.code or 0)
        return code, Path(log.name).read_text()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Callable[..., tuple[int, str]]]:
    """Runs a program on two ranks of processes that are there already; the first exit code but 0, and all output.

    For what is not about torchrun: processes of its own would take longer to start than a tiny job takes.
    """
    workers = WorkerPool(2)

    def run(*arguments: str) -> tuple[int, str]:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        ended = workers.run(run_as_launched, port, arguments, timeout=120)
        return max(code for code, _ in ended), "".join(output for _, output in ended)

    yield run
    workers.close()


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten files of nonsense that repeats itself, a few thousand tokens in all."""
    folder = tmp_path_factory.mktemp("text")
    for index in range(10):
        words = random.Random(index).choices(WORDS, k=1000)
        (folder / f"{index}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(scope="session")
def tiny_job(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> Callable[..., TinyJob]:
    """Makes a tiny job in a run directory of its own."""

    def make(recipe: str = "bf16") -> TinyJob:
        folder = tmp_path_factory.mktemp("job")
        path = folder / "tiny.toml"
        path.write_text(TINY.format(recipe=recipe, run_dir=folder / "run", text=text_folder))
        return TinyJob(path, folder / "run")

    return make


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Starts torchrun."""
    launcher = Launcher()
    yield launcher
    for process in launcher.started:
        process.kill()


@pytest.fixture
def own_process() -> Iterator[None]:
    """For jobs in this process: one thread, as under torchrun; takes down the process group a failed job leaves."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
    if dist.is_initialized():
        dist.destroy_process_group()
