"""What every test gets: markers, and the fixtures that run one test on gloo and again on NCCL."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from te_dist import __main__ as command
from te_dist.testing import WorkerPool, pool
from te_dist.testing.pool import lacking_gpus
from tests import selection

ROOT = Path(__file__).parent
NUM_GPUS = torch.cuda.device_count()
_LEFT = pytest.StashKey[int]()  # to --exhaustive
_LONG = {"distributed", "launch", "simulation"}

hypothesis.settings.register_profile("te_dist", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("te_dist")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="all cases and kernels, not what every run takes")


def pytest_configure(config: pytest.Config) -> None:
    # As worker processes of tests have it: libraries may sum in another order with another number of threads.
    torch.set_num_threads(1)
    config.addinivalue_line("markers", "distributed: runs in worker processes of te_dist.testing.pool")
    config.addinivalue_line("markers", "gloo_only(reason): not run over NCCL, for this reason")
    for marker in selection.MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_report_header(config: pytest.Config) -> list[str]:
    cases = "all" if config.getoption("exhaustive") else "those of every run; the others with --exhaustive"
    return [f"cases: {cases}", *([] if NUM_GPUS else ["tests/gpu: not read, there is no GPU"])]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Thousands of tests need not be read to be skipped."""
    return True if collection_path == ROOT / "gpu" and not NUM_GPUS else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(_LEFT, 0):
        terminalreporter.write_line(
            f"{left} cases left out by tests/selection.py; --exhaustive or their names run them"
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Marks tests by where they lie; what takes long comes first, so that no worker is left alone with it."""
    if not any("::" in argument for argument in config.args):
        selection.check_names(items)
    yield
    if not config.getoption("exhaustive"):
        items[:], left = selection.of_every_run(items, config.args)
        config.hook.pytest_deselected(items=left)
        config.stash[_LEFT] = len(left)
    items.sort(key=lambda item: not _LONG.intersection(item.path.relative_to(ROOT).parts))
    for item in items:
        if "distributed" in item.path.relative_to(ROOT).parts[:-1]:
            item.add_marker(pytest.mark.distributed)
        if NUM_GPUS == 0 and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish() -> None:
    """Thousands of tests are not looked at whenever one of them leaves garbage."""
    gc.collect()
    gc.freeze()


class OnePoolAtATime(LoadScopeScheduling):
    """Folders of tests that run in pools of processes go to one worker: two on two cores are hardly faster than one.

    Others go by file, for what a file makes once.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "distributed" if "/distributed/" in nodeid else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """By folder: groups that marks name are passed over by pytest-xdist 3.8 with pytest 9.2."""
    if config.getoption("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False
    return OnePoolAtATime(config, log)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device_type(request: pytest.FixtureRequest) -> str:
    """Runs the test on gloo, and on NCCL where there are GPUs."""
    return request.param


@pytest.fixture
def gpu_ranks() -> Callable[[int], WorkerPool]:
    """`gpu_ranks(world)` is the worker pool of that size on GPUs; the test is skipped where there are too few."""

    def of(world: int) -> WorkerPool:
        if missing := lacking_gpus(world):
            pytest.skip(missing)
        return pool(world, "cuda")

    return of


@pytest.fixture
def ranks(
    device_type: str, request: pytest.FixtureRequest, gpu_ranks: Callable[[int], WorkerPool]
) -> Callable[[int], WorkerPool]:
    """`ranks(world)` is the worker pool of that size; the test is skipped where there are too few GPUs."""
    gloo_only = request.node.get_closest_marker("gloo_only")
    if device_type == "cpu":
        return pool

    def of(world: int) -> WorkerPool:
        if gloo_only:
            pytest.skip(f"on gloo only: {gloo_only.args[0]}")
        return gpu_ranks(world)

    return of


@pytest.fixture
def te_dist_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, object]]:
    """Runs `te-dist` with the given arguments; returns what it printed last and its exit status."""

    def run(*arguments: str) -> tuple[str, object]:
        monkeypatch.setattr(sys, "argv", ["te-dist", *arguments])
        status: object = 0
        try:
            command.main()
        except SystemExit as end:
            status = end.code
        printed = capsys.readouterr()
        return printed.err if status else printed.out, status

    return run
