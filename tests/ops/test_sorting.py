"""Copies sorted by expert, against Python's own sorting."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.ops.sort_by_expert import workspace_size
from te_dist.testing import assert_bitwise
from tests.ops.sorting import experts_of, sorted_outputs, wanted

# Less than a chunk of copies, chunks to the last and beyond, fewer and more experts than four warps count for.
COPIES = [(1, 1, 1), (0, 2, 3), (32, 8, 5), (257, 8, 100), (700, 3, 7), (40, 2, 3000), (64, 4, 8192)]

FIRSTS = (None, 0, 2)  # others are among those here, or elsewhere


def sort(experts: Tensor, num_experts: int, first: int | None = None) -> dict[str, Tensor]:
    found = sorted_outputs(experts, num_experts)
    workspace = torch.full((workspace_size(experts.numel(), num_experts),), -7, dtype=torch.int32)
    ops.sort_by_expert(experts, first=first, workspace=workspace, **found)
    return found


@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize(("rows", "copies", "num_experts"), COPIES)
def test_copies_come_by_expert_and_then_in_order(rows: int, copies: int, num_experts: int, first: int | None) -> None:
    experts = experts_of(rows, copies, num_experts)
    found = sort(experts, num_experts, first)
    for name, value in wanted(experts, num_experts, first).items():
        assert_bitwise(found[name], value, name)


def test_what_does_not_fit_is_refused() -> None:
    experts = experts_of(20, 2, 5)
    with pytest.raises(ValueError, match="wanted less than 2\\^31 for 1 to 8192"):
        sort(experts, 8193)
    with pytest.raises(ValueError, match="first: got -1"):
        sort(experts, 5, -1)
    with pytest.raises(ValueError, match="experts"):
        sort(experts.int(), 5)
    with pytest.raises(ValueError, match="workspace"):
        ops.sort_by_expert(experts, workspace=torch.zeros(3, dtype=torch.int32), **sorted_outputs(experts, 5))
