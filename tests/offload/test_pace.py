"""What is parked lies evenly among what is saved, as soon as it is known how much that is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist.offload import pace
from te_dist.offload.activations import Parked, Session, policy

SIZE = 1024  # bytes of each tensor


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_saved_before", {})


def tensors(number: int) -> list[Tensor]:
    return [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(number)]


def parked_of(saved: list[Tensor], budget: int | None) -> str:
    """Of each tensor, "p" where it is parked and "." where it stays, in one pass."""
    session = Session(policy(budget, 0, 0), None)
    packed = [session.pack(tensor) for tensor in saved]
    session.end()
    return "".join("p" if isinstance(each, Parked) else "." for each in packed)


def test_the_first_pass_parks_what_comes_first_and_others_spread_it():
    assert parked_of(tensors(8), 4 * SIZE) == "pppp...."
    for _ in range(2):
        assert parked_of(tensors(8), 4 * SIZE) == "p.p.p.p."
    assert parked_of(tensors(8), 3 * SIZE) == "ppp....."  # another budget
    assert parked_of(tensors(8), 3 * SIZE) == "p..p..p."


def test_passes_of_other_lengths_stay_within_the_budget():
    parked_of(tensors(4), 2 * SIZE)
    assert parked_of(tensors(8), 2 * SIZE) == "p.p....."
    assert parked_of(tensors(4), 2 * SIZE) == "p..."
    assert parked_of(tensors(4), 2 * SIZE) == "p.p."


def test_all_is_parked_where_there_is_room():
    for budget in (None, 8 * SIZE):
        for _ in range(2):
            assert parked_of(tensors(8), budget) == "pppppppp"


def test_what_lies_in_a_storage_that_stays_stays():
    for expected in ("ppp.", "p..p"):
        a, b, c = tensors(3)
        assert parked_of([a, b, b[: SIZE // 2], c], 2 * SIZE) == expected


def test_a_pass_that_saves_nothing_says_nothing_of_the_next():
    parked_of(tensors(8), 4 * SIZE)
    assert parked_of([], 4 * SIZE) == ""
    assert parked_of(tensors(8), 4 * SIZE) == "p.p.p.p."
