"""Adam over many tensors: against float64 and against torch's, on every type, length and SIMD level."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from te_dist import _C
from te_dist.ops.multi_adam import AdamRule, AdamSignals, Adapted, MultiAdam
from te_dist.testing import assert_bitwise

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LENGTHS = (1, 7, 64, 1000, 16384 + 3, 70_000)
DECOUPLED = AdamRule(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True)
ADDED = AdamRule(lr=3e-2, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.01, decoupled=False)
RULES = {"AdamW": DECOUPLED, "Adam": ADDED}


def noise(length: int, seed: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)).to(dtype)


def adapted(value: Tensor, copy: Tensor | None = None) -> Adapted:
    moments = (torch.zeros(value.shape) for _ in range(2))
    return Adapted(value, *moments, torch.zeros(()), copy)


def steps(tensors: list[Adapted], rule: AdamRule, grads: list[list[Tensor]], signals: AdamSignals) -> None:
    multi = MultiAdam([tensors], grads[0], noop=torch.zeros(1, dtype=torch.int32))
    for own in grads:
        multi.run(own, [rule], [signals])


def exact(value: Tensor, rule: AdamRule, grads: list[Tensor]) -> Iterator[Tensor]:
    """Values after each step, in float64."""
    value, first, second = value.double(), torch.zeros(()).double(), torch.zeros(()).double()
    for number, given in enumerate(grads, 1):
        grad = given.double() + (0.0 if rule.decoupled else rule.weight_decay * value)
        if rule.decoupled:
            value = value * (1 - rule.lr * rule.weight_decay)
        first = rule.beta1 * first + (1 - rule.beta1) * grad
        second = rule.beta2 * second + (1 - rule.beta2) * grad**2
        root = (second / (1 - rule.beta2**number)).sqrt() + rule.eps
        value = value - rule.lr * first / (1 - rule.beta1**number) / root
        yield value


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("grad_type", [F32, BF16, F16])
def test_values_are_those_of_float64_to_rounding(rule, grad_type):
    tensors = [adapted(noise(length, length)) for length in LENGTHS]
    starts = [each.value.clone() for each in tensors]
    grads = [[noise(length, 10 * turn + length, grad_type) for length in LENGTHS] for turn in range(4)]
    steps(tensors, rule, grads, AdamSignals())
    for number, each in enumerate(tensors):
        *_, want = exact(starts[number], rule, [own[number] for own in grads])
        torch.testing.assert_close(each.value.double(), want, rtol=0, atol=2e-6)
        assert each.step.item() == 4


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_values_are_those_of_torch_to_rounding(rule):
    tensors = [adapted(noise(length, length)) for length in LENGTHS]
    params = [torch.nn.Parameter(each.value.clone()) for each in tensors]
    kind = torch.optim.AdamW if rule.decoupled else torch.optim.Adam
    theirs = kind(
        params, lr=rule.lr, betas=(rule.beta1, rule.beta2), eps=rule.eps, weight_decay=rule.weight_decay, fused=True
    )
    for turn in range(4):
        grads = [noise(length, 10 * turn + length) for length in LENGTHS]
        steps(tensors, rule, [grads], AdamSignals())
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        theirs.step()
    for each, param in zip(tensors, params, strict=True):
        torch.testing.assert_close(each.value, param.detach(), rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(each.exp_avg, theirs.state[param]["exp_avg"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(each.exp_avg_sq, theirs.state[param]["exp_avg_sq"], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("value_type", [BF16, F16])
def test_values_without_a_master_are_rounded_once(value_type):
    value, grads = noise(1000, 0, value_type), [[noise(1000, 1)]]
    master, copy = value.float(), torch.zeros(1000, dtype=value_type)
    steps([adapted(value)], DECOUPLED, grads, AdamSignals())
    steps([adapted(master, copy)], DECOUPLED, grads, AdamSignals())
    assert_bitwise(value, master.to(value_type), "value")
    assert_bitwise(copy, master.to(value_type), "copy")


@pytest.mark.parametrize("grad_type", [F32, BF16])
def test_every_simd_level_writes_the_same_bits(grad_type):
    results = []
    used = _C.simd_level()
    try:
        for level in _C.simd_levels():
            _C.set_simd_level(level)
            tensors = [adapted(noise(length, length), torch.zeros(length, dtype=BF16)) for length in LENGTHS]
            grads = [[noise(length, turn, grad_type) for length in LENGTHS] for turn in range(2)]
            steps(tensors, ADDED, grads, AdamSignals(grad_scale=torch.tensor(3.0)))
            results.append([t for each in tensors for t in each.tensors])
    finally:
        _C.set_simd_level(used)
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            assert_bitwise(got, want, "a SIMD level's result")


def test_gradients_are_unscaled_and_steps_with_infinities_are_left_out():
    plain, scaled = adapted(noise(1000, 0)), adapted(noise(1000, 0))
    grad = noise(1000, 1)
    steps([plain], DECOUPLED, [[grad]], AdamSignals())
    signals = AdamSignals(grad_scale=torch.tensor([1024.0]), found_inf=torch.tensor([0.0]))
    steps([scaled], DECOUPLED, [[grad * 1024]], signals)
    steps([scaled], DECOUPLED, [[grad]], signals._replace(found_inf=torch.tensor([1.0])))
    for got, want in zip(scaled.tensors[:4], plain.tensors[:4], strict=True):
        assert_bitwise(got, want, "state")


def test_lr_may_be_a_tensor():
    one, other = adapted(noise(100, 0)), adapted(noise(100, 0))
    steps([one], DECOUPLED, [[noise(100, 1)]], AdamSignals())
    lr = torch.tensor(DECOUPLED.lr, dtype=torch.float64)
    steps([other], AdamRule(0.0, 0.9, 0.999, 1e-8, 0.1, True), [[noise(100, 1)]], AdamSignals(lr=lr))
    assert_bitwise(one.value, other.value, "value")
