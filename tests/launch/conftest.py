"""A tiny job: text made here, a decoder of two narrow blocks, a few steps; run in this process or under torchrun."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

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

    def run(self, *arguments: str) -> tuple[int, str]:
        """Exit code and output of a finished `torchrun`."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output


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
