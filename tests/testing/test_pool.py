"""The worker pool: results, failures, deaths and hangs of ranks, and a clean pool afterwards."""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from te_dist import testing
from te_dist.testing import RankError, WorkerPool, assert_bitwise, pool
from te_dist.testing.pool import lacking_gpus

pytestmark = pytest.mark.distributed


@dataclass(frozen=True)
class Point:
    """An argument whose class lives in a test module."""

    x: int
    y: int


class Unpicklable(Exception):
    """An exception that pickle cannot rebuild."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def place(rank: int, world: int) -> tuple[int, int, int]:
    """Where the function runs."""
    return rank, world, os.getpid()


def all_reduced(rank: int, world: int, scale: float) -> torch.Tensor:
    """(2,) sum of the ranks, scaled."""
    x = torch.full((2,), float(rank), device=testing.device())
    dist.all_reduce(x)
    return x * scale


def gathered_over_mesh(rank: int, world: int) -> list[int]:
    """Ranks along the second dimension of a 2 x 2 mesh."""
    mesh = testing.mesh((2, 2), ("dp", "tp"))
    assert testing.mesh((2, 2), ("dp", "tp")) is mesh
    x = torch.tensor([rank])
    out = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(out, x, group=mesh.get_group("tp"))
    return [int(t) for t in out]


def moved(rank: int, world: int, point: Point) -> Point:
    """The point, one rank further."""
    return Point(point.x + rank, point.y)


def first_random(rank: int, world: int) -> float:
    """The first number of the generator."""
    return torch.rand(()).item()


def fail_on(rank: int, world: int, bad_rank: int) -> None:
    """Raises on one rank while the others wait for it."""
    if rank == bad_rank:
        raise ValueError(f"layer.weight on rank {rank} is wrong")
    dist.barrier()


def refuse(rank: int, world: int) -> NoReturn:
    """Raises alike on all ranks."""
    raise ValueError("refused everywhere")


def raise_unpicklable(rank: int, world: int) -> NoReturn:
    """Raises what cannot travel."""
    raise Unpicklable(1, 2)


def return_unpicklable(rank: int, world: int) -> object:
    """Returns what cannot travel."""
    return lambda: None


def die_on(rank: int, world: int, bad_rank: int) -> None:
    """Ends the process of one rank while the others wait for it."""
    if rank == bad_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def exit_on(rank: int, world: int, bad_rank: int) -> None:
    """Leaves the interpreter without cleaning up."""
    if rank == bad_rank:
        os._exit(7)
    dist.barrier()


def hang_on(rank: int, world: int, bad_rank: int) -> None:
    """Never returns on one rank."""
    while rank == bad_rank:
        time.sleep(0.1)


def is_gone(pid: int) -> bool:
    """Whether a process has ended and was reaped."""
    return not Path(f"/proc/{pid}").exists()


def test_results_come_in_rank_order() -> None:
    assert [result[:2] for result in pool(2).run(place)] == [(0, 2), (1, 2)]


def test_workers_are_started_once_and_run_other_processes() -> None:
    first, second = pool(2).run(place), pool(2).run(place)
    assert first == second
    assert os.getpid() not in [pid for _, _, pid in first]


def test_ranks_communicate_and_tensors_travel() -> None:
    for result in pool(3).run(all_reduced, 2.0):
        assert_bitwise(result, torch.full((2,), 6.0), "all_reduced")


def states(pids: list[int]) -> set[str]:
    """As the system calls them: T is stopped."""
    return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_pools_rest_while_another_one_works() -> None:
    two, three = ([pid for _, _, pid in pool(world).run(place)] for world in (2, 3))
    wait_until(lambda: states(two) == {"T"}, "those of two ranks do not rest")
    assert "T" not in states(three)
    assert [pid for _, _, pid in pool(2).run(place)] == two
    wait_until(lambda: states(three) == {"T"}, "those of three ranks do not rest")


def test_ranks_that_rest_end_where_nobody_is_left_to_call_them() -> None:
    own = WorkerPool(2)
    pids = [pid for _, _, pid in own.run(place)]
    pool(3).run(place)
    wait_until(lambda: states(pids) == {"T"}, "they do not rest")
    for worker in own._workers:
        worker.connection.close()  # as the system does when a process ends
    wait_until(lambda: all(map(is_gone, pids)), "they are still there")


def test_a_call_that_is_broken_off_leaves_a_clean_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    own = WorkerPool(1)
    pids = [pid for _, _, pid in own.run(place)]
    with monkeypatch.context() as patch:
        patch.setattr(own, "_collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            own.run(first_random)
    assert all(map(is_gone, pids))
    assert [result[:2] for result in own.run(place)] == [(0, 1)]
    own.close()


def interrupt(limit: float) -> NoReturn:
    raise KeyboardInterrupt


def test_meshes_are_made_once() -> None:
    assert pool(4).run(gathered_over_mesh) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_arguments_may_be_of_classes_of_the_test_module() -> None:
    assert pool(2).run(moved, Point(1, 2)) == [Point(1, 2), Point(2, 2)]


def test_every_call_starts_from_the_same_seed() -> None:
    assert len({*pool(2).run(first_random), *pool(2).run(first_random)}) == 1


def test_a_failing_rank_raises_its_own_exception_with_rank_and_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[WorkerPool.__module__], "GRACE", 0.5)  # the other rank waits all the time
    with pytest.raises(ValueError, match="layer.weight on rank 1 is wrong") as caught:
        pool(2).run(fail_on, 1)
    notes = "\n".join(caught.value.__notes__)
    assert "raised by rank 1 first in fail_on over 2 ranks" in notes
    assert "in fail_on\n    raise ValueError" in notes
    assert pool(2).run(place)[1][:2] == (1, 2)


def test_an_error_of_all_ranks_is_raised_as_it_is() -> None:
    with pytest.raises(ValueError, match="refused everywhere"):
        pool(2).run(refuse)


def test_exceptions_and_results_that_do_not_pickle_are_told_as_text() -> None:
    with pytest.raises(RuntimeError, match="Unpicklable: 1 and 2"):
        pool(1).run(raise_unpicklable)
    with pytest.raises(Exception, match="return_unpicklable"):
        pool(1).run(return_unpicklable)


@pytest.mark.parametrize(("fn", "how"), [(die_on, "signal SIGKILL"), (exit_on, "exit code 7")])
def test_a_dying_rank_is_named_and_the_next_call_has_new_workers(fn: object, how: str) -> None:
    before = pool(2).run(place)
    with pytest.raises(RankError, match=rf"rank 0 died \({how}\) in {fn.__name__} over 2 ranks"):
        pool(2).run(fn, 0)
    assert {pid for *_, pid in pool(2).run(place)}.isdisjoint(pid for *_, pid in before)


def test_a_rank_that_died_between_calls_is_replaced() -> None:
    _, (_, _, pid) = pool(2).run(place)
    os.kill(pid, signal.SIGKILL)
    while not is_gone(pid):
        time.sleep(0.01)
    assert [result[0] for result in pool(2).run(place)] == [0, 1]


def test_a_hanging_rank_ends_with_the_time_and_shows_its_stack() -> None:
    with pytest.raises(RankError, match=r"ranks \[1\] did not finish within 0.5 s in hang_on") as caught:
        pool(2).run(hang_on, 1, timeout=0.5)
    assert "in hang_on" in "\n".join(caught.value.__notes__)
    assert [result[0] for result in pool(2).run(place)] == [0, 1]


def test_functions_inside_functions_are_refused() -> None:
    with pytest.raises(ValueError, match="is no module-level function"):
        pool(2).run(lambda rank, world: rank)


def test_a_closed_pool_leaves_no_process_and_can_be_used_again() -> None:
    own = WorkerPool(1)
    ((_, _, pid),) = own.run(place)
    own.close()
    assert is_gone(pid)
    assert own.run(place)[0][0] == 0
    own.close()


def start_two_on_gpus() -> None:
    WorkerPool(2, "cuda").run(place)


@pytest.mark.parametrize(
    ("gpus", "shared", "missing"),
    [(0, "1", "needs 2 GPUs, this machine has 0"), (1, "0", "needs 2 GPUs, this machine has 1; NCCL from 2.30 lets")],
)
def test_ranks_without_gpus_are_refused(monkeypatch, gpus, shared, missing) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", shared)
    with pytest.raises(RuntimeError, match=missing):
        start_two_on_gpus()


@pytest.mark.parametrize(("gpus", "shared"), [(2, "0"), (1, "1")])
def test_ranks_have_gpus_or_share_them(monkeypatch, gpus, shared) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", shared)
    assert lacking_gpus(2) == ""
