"""Rows behind the last group of a linear map of groups: whatever they hold, nothing of it comes out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist.nn import group_table
from te_dist.nn.group_fronts import SWIGLU, WEIGHTED_SWIGLU, GroupFront
from te_dist.nn.grouped_products import Given
from te_dist.testing import assert_bitwise
from tests.nn.test_grouped_linear import COMPUTED, IN, OUT, inside, make, normal

SIZES = [5, 0, 130]
END, ROWS = sum(SIZES), sum(SIZES) + 141  # further tiles, the last one not full
FRONTS = {"none": None, "swiglu": SWIGLU, "weighted": WEIGHTED_SWIGLU}


def step(name: str, front: GroupFront | None, rest: float) -> list[Tensor]:
    """Output and gradients of a pass with `rest` in all rows behind the last group, those of the output's too."""
    module, made_by = make(len(SIZES), single_grouped_weight=True), COMPUTED[name]
    x, p = normal(ROWS, IN if front is None else 2 * IN), normal(ROWS, seed=3).sigmoid()
    grad = normal(ROWS, OUT, seed=2)
    for tensor in (x, p, grad):
        tensor[END:] = rest
    x, p = x.requires_grad_(), p.requires_grad_()
    given = Given(group_table(torch.tensor(SIZES), ROWS).tensor, None, front=front)  # type: ignore[arg-type]
    beside = [p] if front is WEIGHTED_SWIGLU else []
    biases = [module.bias0, module.bias1, module.bias2]
    with inside(made_by):
        out = module.gemm(x, [module.weight], given=given, biases=biases, beside=beside)
    out.backward(grad)
    return [out.detach(), x.grad, *([p.grad] if beside else []), module.weight.grad, *(bias.grad for bias in biases)]


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("name", COMPUTED)
def test_no_rows_give_gradients_of_zeros(name: str, front: str) -> None:
    module, made_by = make(len(SIZES), single_grouped_weight=True), COMPUTED[name]
    x, p = torch.zeros(0, IN if front == "none" else 2 * IN, requires_grad=True), torch.zeros(0, requires_grad=True)
    given = Given(group_table(torch.zeros(3, dtype=torch.int64), 0).tensor, None, front=FRONTS[front])
    with inside(made_by):
        out = module.gemm(x, [module.weight], given=given, beside=[p] if front == "weighted" else [])
    out.sum().backward()
    assert out.shape == (0, OUT) and x.grad.shape == x.shape
    assert not module.weight.grad.any()


@pytest.mark.every_run(name=("plain", "delayed", "block", "mxfp8", "nvfp4", "hybrid"))
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("name", COMPUTED)
def test_nan_behind_the_last_group_changes_no_bit(name: str, front: str) -> None:
    want, got = (step(name, FRONTS[front], rest) for rest in (0.0, float("nan")))
    for number, (value, wanted) in enumerate(zip(got, want, strict=True)):
        assert wanted.isfinite().all(), number
        assert_bitwise(value, wanted, f"result {number}")
    for value in got[: -1 - len(SIZES)]:
        assert not value[END:].any()
