"""Clipping by norm without meshes: torch's results, 16-bit gradients in fp32, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from te_dist import optim
from te_dist.testing import assert_bitwise

SHAPES = [(33, 7), (5,), (), (0, 4), (128, 64)]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator, found = torch.Generator().manual_seed(0), []
    for shape in SHAPES:
        found.append(nn.Parameter(torch.zeros(shape, dtype=dtype)))
        found[-1].grad = torch.randn(shape, generator=generator).to(dtype)
    return [*found, nn.Parameter(torch.zeros(3))]  # one without a gradient


def grads(params: list[nn.Parameter]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("order", [0.5, 1, 2, 3.5, math.inf, "inf"])
@pytest.mark.parametrize("limit", [0.1, 1e6])
def test_it_is_torchs(limit: float, order: float, foreach: bool | None) -> None:
    ours, theirs = parameters(), parameters()
    del theirs[3].grad  # empty: torch has no largest magnitude of it
    got = optim.clip_grad_norm_(iter(ours), limit, order, False, foreach)
    want = nn.utils.clip_grad_norm_(theirs, limit, order, False, foreach)
    assert_bitwise(got, want, "norm")
    del ours[3].grad
    for index, (grad, other) in enumerate(zip(grads(ours), grads(theirs), strict=True)):
        assert_bitwise(grad, other, f"gradient {index}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_norm_is_as_exact_as_fp32_or_the_gradients(dtype: torch.dtype) -> None:
    params = parameters(dtype)
    want = torch.cat([grad.double().flatten() for grad in grads(params)]).norm()
    got = optim.clip_grad_norm_(params, 1.0)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got.double(), want, rtol=1e-14 if dtype == torch.float64 else 1e-6, atol=0)
    after = torch.cat([grad.double().flatten() for grad in grads(params)]).norm()
    torch.testing.assert_close(after, torch.ones((), dtype=torch.float64), rtol=2e-3, atol=0)


def test_one_tensor_will_do_and_no_gradient_too() -> None:
    param = nn.Parameter(torch.zeros(2))
    assert optim.clip_grad_norm_(param, 1.0) == 0
    param.grad = torch.tensor([3.0, 4.0])
    assert optim.clip_grad_norm_(param, 1.0) == 5
    torch.testing.assert_close(param.grad, torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_raises_where_asked_for(value: float) -> None:
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([1.0, value])
    with pytest.raises(RuntimeError, match="error_if_nonfinite=False"):
        optim.clip_grad_norm_(param, 1.0, error_if_nonfinite=True)
    assert param.grad[0] == 1  # as it was
    assert not torch.isfinite(optim.clip_grad_norm_(param, 1.0))


@pytest.mark.parametrize("order", [0, -1, -math.inf, math.nan])
def test_what_is_no_norm_is_refused(order: float) -> None:
    with pytest.raises(ValueError, match="norm_type: got"):
        optim.clip_grad_norm_([], 1.0, order)
