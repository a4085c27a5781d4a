"""Sorting by expert: an order that never varies, gathers that undo each other, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist.nn.moe import Permutation, permute, permute_probabilities, sort_by_expert, unpermute
from te_dist.testing import assert_bitwise

ROWS, COPIES, HIDDEN = 30, 3, 8


def choices(num_experts: int, rows: int = ROWS) -> Tensor:
    """Different experts in each row; of many experts some that nobody chose."""
    generator = torch.Generator().manual_seed(num_experts)
    return torch.stack([torch.randperm(num_experts, generator=generator)[:COPIES] for _ in range(rows)])


def whole_numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values whose sums are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("num_experts", [3, 5, 200, 40_000])
def test_rows_come_by_expert_and_then_in_their_own_order(num_experts: int) -> None:
    experts = choices(num_experts)
    found = sort_by_expert(experts, num_experts)
    want = sorted(
        (expert, row, copy) for row, of_row in enumerate(experts.tolist()) for copy, expert in enumerate(of_row)
    )
    assert found.index.tolist() == [row for _, row, _ in want]
    assert found.choices.tolist() == [row * COPIES + copy for _, row, copy in want]
    assert found.counts.tolist() == torch.bincount(experts.flatten(), minlength=num_experts).tolist()
    assert_bitwise(found.index[found.positions], torch.arange(ROWS)[:, None].expand(ROWS, COPIES).contiguous(), "rows")


def test_rows_for_no_expert_sort_behind() -> None:
    experts = choices(5)
    experts[4, 1] = experts[9, 0] = 5
    found = sort_by_expert(experts, 5)
    assert int(found.counts.sum()) == ROWS * COPIES - 2
    assert found.index[-2:].tolist() == [4, 9]


@pytest.mark.parametrize("nobody", [-1, -70_000, 5, 40_000, 65_536, 65_537])
@pytest.mark.parametrize("num_experts", [5, 40_000])
def test_numbers_of_no_expert_are_nobodys(num_experts: int, nobody: int) -> None:
    if 0 <= nobody < num_experts:
        return
    found = sort_by_expert(torch.tensor([[0, 1], [nobody, 2]]), num_experts)
    assert found.counts.tolist() == [1, 1, 1] + [0] * (num_experts - 3)
    assert found.positions.tolist() == [[0, 1], [3, 2]]


def test_no_rows_are_sorted_into_empty_experts() -> None:
    found = sort_by_expert(torch.empty(0, COPIES, dtype=torch.int64), 4)
    assert found.counts.tolist() == [0] * 4
    assert unpermute(permute(torch.empty(0, HIDDEN), found), found).shape == (0, HIDDEN)


def test_an_expert_sees_rows_in_the_same_order_however_they_are_split() -> None:
    experts, num_experts = choices(5), 5
    whole, parts = sort_by_expert(experts, num_experts), [sort_by_expert(p, num_experts) for p in experts.split(11)]
    of_part = [(p.index + 11 * n).split(p.counts.tolist()) for n, p in enumerate(parts)]
    joined = torch.cat([rows for of_expert in zip(*of_part, strict=True) for rows in of_expert])
    assert_bitwise(joined, whole.index, "rows")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathers_and_their_gradients_are_those_of_indexing(dtype: torch.dtype) -> None:
    found = sort_by_expert(choices(5), 5)
    x = whole_numbers(ROWS, HIDDEN, dtype=dtype).requires_grad_()
    down = whole_numbers(ROWS * COPIES, HIDDEN, dtype=dtype).flip(0)
    rows = permute(x, found)
    assert_bitwise(rows.detach(), x.detach()[found.index], "rows")
    rows.backward(down)
    want = torch.zeros(ROWS, HIDDEN, dtype=torch.float64).index_add_(0, found.index, down.double())
    assert_bitwise(x.grad, want.to(dtype), "gradient of the sources")

    y = down.clone().requires_grad_()
    out = unpermute(y, found)
    assert_bitwise(out.detach(), want.to(dtype), "sums")
    out.backward(x.detach())
    assert_bitwise(y.grad, x.detach()[found.index], "gradient of the rows")


def test_sums_of_copies_are_rounded_once() -> None:
    found = Permutation(*(torch.tensor(t) for t in ([0, 0, 0], [0, 1, 2], [[0, 1, 2]], [3])))
    rows = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], dtype=torch.bfloat16)
    assert float(unpermute(rows, found)) == 1.0 + 2.0**-7


def test_probabilities_weigh_copies_and_get_gradients() -> None:
    found = sort_by_expert(choices(5), 5)
    rows = whole_numbers(ROWS * COPIES, HIDDEN).double().float().requires_grad_()
    probabilities = (whole_numbers(ROWS, COPIES) / 8).requires_grad_()
    down = whole_numbers(ROWS, HIDDEN).flip(0)
    out = unpermute(rows, found, probabilities=probabilities)
    out.backward(down)
    got = out.detach(), rows.grad, probabilities.grad
    rows, probabilities = (t.detach().requires_grad_() for t in (rows, probabilities))
    copies = rows[found.positions] * probabilities[..., None]
    copies.sum(1).backward(down)
    for name, a, b in zip(
        ("out", "rows", "probabilities"), got, (copies.sum(1), rows.grad, probabilities.grad), strict=True
    ):
        assert_bitwise(a + 0.0, b.detach() + 0.0, name)  # zeros may differ in sign


def test_probabilities_follow_their_rows() -> None:
    found = sort_by_expert(choices(5), 5)
    probabilities = torch.rand(ROWS, COPIES, requires_grad=True)
    sorted_ones = permute_probabilities(probabilities, found)
    assert_bitwise(sorted_ones.detach(), probabilities.detach().flatten()[found.choices], "values")
    down = torch.rand(ROWS * COPIES)
    sorted_ones.backward(down)
    assert_bitwise(probabilities.grad, down[found.positions], "gradient")
    with pytest.raises(ValueError, match="wanted one of each choice"):
        permute_probabilities(probabilities.t(), found)


def test_copies_that_are_elsewhere_add_nothing() -> None:
    experts = choices(5)
    found = sort_by_expert(experts, 2, first=2)
    here, num_rows = (experts == 2) | (experts == 3), int(found.counts.sum())
    assert (found.positions[~here] == experts.numel()).all()
    found = found._replace(index=found.index[:num_rows], choices=found.choices[:num_rows])
    rows, down = whole_numbers(num_rows, HIDDEN).requires_grad_(), whole_numbers(ROWS, HIDDEN).flip(0)
    probabilities = (whole_numbers(ROWS, COPIES) / 8).requires_grad_()
    unpermute(rows, found, probabilities=probabilities).backward(down)
    assert_bitwise(probabilities.grad != 0, here & (probabilities.grad != 0), "probabilities that count")
    want = (down[found.index] * rows.detach()).sum(1)
    assert_bitwise(probabilities.grad.flatten()[found.choices], want, "gradients of those here")
    for again in (False, True):
        values = torch.ones(ROWS, COPIES, requires_grad=True)
        of_rows = permute_probabilities(values, found)
        (grad,) = torch.autograd.grad(of_rows.sum(), values, create_graph=again)
        assert_bitwise(grad.detach(), here.float(), f"gradient, with a graph of its own: {again}")
