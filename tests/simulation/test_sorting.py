"""Copies sorted by the kernels for CUDA, simulated, against Python's own sorting."""

from __future__ import annotations

import pytest

from te_dist.testing import assert_bitwise
from tests.ops.sorting import experts_of, wanted
from tests.ops.test_sorting import COPIES, FIRSTS, sort

pytestmark = pytest.mark.usefixtures("simulated")


@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize(("rows", "copies", "num_experts"), COPIES)
def test_copies_come_by_expert_and_then_in_order(rows: int, copies: int, num_experts: int, first: int | None) -> None:
    experts = experts_of(rows, copies, num_experts)
    found = sort(experts, num_experts, first)
    for name, value in wanted(experts, num_experts, first).items():
        assert_bitwise(found[name], value, name)
