"""Choosing and sorting, against Python's own sorting."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.ops.sort_by_expert import workspace_shape
from te_dist.testing import assert_bitwise
from tests.ops.sorting import experts_of, largest, scores, sorted_outputs, wanted

# Less than a chunk of copies, chunks to the last and beyond, fewer and more experts than four warps count for.
COPIES = [(1, 1, 1), (0, 2, 3), (32, 8, 5), (257, 8, 100), (700, 3, 7), (40, 2, 3000), (64, 4, 8192)]
VALUES = [(70, 40, 8), (9, 130, 3), (1, 1, 1), (33, 31, 31), (7, 500, 9), (5, 1000, 6), (5, 300, 0), (0, 4, 2)]


def sort(experts: Tensor, num_experts: int) -> dict[str, Tensor]:
    found = sorted_outputs(experts, num_experts)
    workspace = torch.full(workspace_shape(experts.numel(), num_experts), -7, dtype=torch.int32)
    ops.sort_by_expert(experts, workspace=workspace, **found)
    return found


def choose(x: Tensor, bias: Tensor | None, count: int) -> Tensor:
    out = torch.full((x.shape[0], count), -1, dtype=torch.int64)
    ops.top_k(x, bias=bias, out=out)
    return out


@pytest.mark.parametrize(("rows", "copies", "num_experts"), COPIES)
def test_copies_come_by_expert_and_then_in_order(rows: int, copies: int, num_experts: int) -> None:
    experts = experts_of(rows, copies, num_experts)
    for name, value in wanted(experts, num_experts).items():
        assert_bitwise(sort(experts, num_experts)[name], value, name)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "cols", "count"), VALUES)
def test_the_largest_are_found(rows: int, cols: int, count: int, biased: bool) -> None:
    x, bias = scores(rows, cols), torch.linspace(-1, 1, cols) if biased else None
    assert choose(x, bias, count).tolist() == largest(x, bias, count)


def test_rows_of_nan_have_different_columns() -> None:
    assert choose(torch.full((2, 6), torch.nan), None, 4).tolist() == [[0, 1, 2, 3]] * 2


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="at most the 4"):
        choose(x, None, 5)
    with pytest.raises(ValueError, match="bias"):
        choose(x, torch.zeros(5), 2)
    with pytest.raises(ValueError, match="x: "):
        choose(x.double(), None, 2)
    experts = experts_of(20, 2, 5)
    with pytest.raises(ValueError, match="wanted less than 2\\^31 for 1 to 8192"):
        sort(experts, 8193)
    with pytest.raises(ValueError, match="experts"):
        sort(experts.int(), 5)
    with pytest.raises(ValueError, match="workspace"):
        ops.sort_by_expert(experts, workspace=torch.zeros(3, 1, dtype=torch.int32), **sorted_outputs(experts, 5))
