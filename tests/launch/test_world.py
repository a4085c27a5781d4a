"""Agreement of ranks, here threads over one store."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from te_dist.launch.errors import JobError
from te_dist.launch.world import World

REASON = JobError("the file", got="none", wanted="one", remedy="write it")


def on_ranks(call: Callable[[World], Any], size: int = 3) -> list[Any]:
    """What `call` returns or raises on each of `size` ranks."""
    store = dist.HashStore()

    def outcome(rank: int) -> Any:
        try:
            return call(World(store, rank, size))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(outcome, range(size)))


def fail_on(world: World, ranks: tuple[int, ...], error: Exception) -> int:
    """Raises on some ranks, returns the rank on others."""
    if world.rank in ranks:
        raise error
    return world.rank


def test_ranks_that_all_succeed_keep_their_results() -> None:
    assert on_ranks(lambda world: world.agree(lambda: world.rank)) == [0, 1, 2]


@pytest.mark.parametrize("ranks", [(0,), (2,), (0, 1, 2)])
def test_the_reason_of_one_rank_ends_all_with_the_same_words(ranks: tuple[int, ...]) -> None:
    outcomes = on_ranks(lambda world: world.agree(lambda: fail_on(world, ranks, REASON)))
    assert all(isinstance(outcome, JobError) for outcome in outcomes)
    assert {str(outcome) for outcome in outcomes} == {str(REASON)}


def test_a_fault_is_raised_where_it_is_and_reported_elsewhere() -> None:
    outcomes = on_ranks(lambda world: world.agree(lambda: fail_on(world, (1,), ZeroDivisionError("oops"))))
    assert [type(outcome).__name__ for outcome in outcomes] == ["_Reported", "ZeroDivisionError", "_Reported"]
    assert str(outcomes[0]) == "rank 1: ZeroDivisionError: oops"


def test_rank_zero_shares_a_text_again_and_again() -> None:
    def twice(world: World) -> tuple[str, str]:
        return world.share(lambda: f"from {world.rank}"), world.share(lambda: "é\n")

    assert on_ranks(twice) == [("from 0", "é\n")] * 3


@pytest.mark.parametrize("ranks", [(), (2,), (0, 1, 2)])
def test_ranks_learn_whether_something_holds_on_any(ranks: tuple[int, ...]) -> None:
    def twice(world: World) -> tuple[bool, bool]:
        return world.any(world.rank in ranks), world.any(False)

    assert on_ranks(twice) == [(bool(ranks), False)] * 3


def test_a_rank_that_never_comes_is_missed_by_the_others() -> None:
    def meet(world: World) -> None:
        world.store.set_timeout(timedelta(seconds=0.5))
        if world.rank != 1:
            world.agree(lambda: None)

    outcomes = on_ranks(meet)
    assert "2 of 3 ranks in time" in str(outcomes[0])
    assert str(outcomes[0]) == str(outcomes[2])


def test_nodes_that_start_processes_again_need_a_store_for_each_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "TORCHELASTIC_RUN_ID": "job",
        "GROUP_WORLD_SIZE": "2",
        "TORCHELASTIC_MAX_RESTARTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(JobError, match=r"torchrun --max-restarts: got 1 on 2 nodes, all attempts of which share"):
        World.meet()


def test_processes_that_torchrun_did_not_start_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(JobError, match=r"WORLD_SIZE: got 2 .* remedy: start the job by torchrun"):
        World.meet()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert World.meet().size == 1
