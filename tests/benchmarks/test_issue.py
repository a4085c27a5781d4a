"""The benchmark of CPU times calls modules and ops with what these take."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import issue_cuda


@pytest.mark.parametrize("make", [issue_cuda.grouped_linears_of_other_rows, issue_cuda.bare_ops_of_other_rows])
def test_calls_with_other_numbers_of_rows_take_them_in_turn(make: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(issue_cuda, "ROWS", 256)
    monkeypatch.setattr(issue_cuda, "WIDTH", 128)
    monkeypatch.setattr(issue_cuda, "GROUPS", (8,))
    monkeypatch.setattr(issue_cuda, "SEVERAL", {"three": 3})
    seen: list[int] = []
    ((_, call),) = make(device="cpu")
    monkeypatch.setattr(call, "_call", lambda place, its=call._call: (seen.append(place), its(place)))
    for _ in range(4):
        call()
    assert seen == [0, 1, 2, 0]


def test_layers_are_run_forward_and_backward(monkeypatch: Any) -> None:
    monkeypatch.setattr(issue_cuda, "ROWS", 256)
    monkeypatch.setattr(issue_cuda, "WIDTH", 128)
    monkeypatch.setattr(issue_cuda, "LAYERS", 2)
    monkeypatch.setattr(issue_cuda, "SEVERAL", {"three": 3})
    lines = dict(issue_cuda.layers_of_other_rows(device="cpu"))
    assert [name.startswith("2 ") for name in lines] == [True] * 6
    for call in lines.values():
        call()
