"""Histories of amaxes moved by the kernels for CUDA, simulated: the bytes of the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from te_dist import ops
from te_dist.testing import assert_bitwise
from tests.ops.histories import LENGTHS, WIDTHS, as_lists, module


def modules(length: int, widths: list[int], algo: Any) -> dict[str, Any]:
    return as_lists([module(length, width, seed=index) for index, width in enumerate(widths)]) | {"algo": algo}


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_histories_move_as_on_the_cpu(
    length: int, widths: list[int], algo: Any, request: pytest.FixtureRequest
) -> None:
    got, want = modules(length, widths, algo), modules(length, widths, algo)
    for _ in range(2):  # the second time nothing was seen, and nothing moves
        ops.advance_histories(**want)
    request.getfixturevalue("simulated")
    for _ in range(2):
        ops.advance_histories(**got)
    for name in ("histories", "running", "scales"):
        for index, expected in enumerate(want[name]):
            assert_bitwise(got[name][index], expected, f"{name}[{index}]")
