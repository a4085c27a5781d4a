"""Adam with state in fewer bytes, on the CPU: the bytes of the definition, for every SIMD level and every cut."""

from __future__ import annotations

import pytest
import torch

from te_dist import _C
from te_dist.ops.multi_adam import AdamRule, AdamSignals, Adapted, MultiAdam
from te_dist.testing import assert_bitwise
from tests.ops.adam_compact import BF16, BYTES, KINDS, Kind, define, made, random, tensors, twin

DECOUPLED = AdamRule(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True)
ADDED = AdamRule(lr=3e-2, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.01, decoupled=False, corrected=False)
SHAPE = (5, 300)  # two blocks and a part of one
NOISE = (2**40 + 5, 3, 1001, 300, 300)


def run(each: Adapted, rule: AdamRule, grad: torch.Tensor) -> None:
    multi = MultiAdam([[each]], [grad], noop=torch.zeros(1, dtype=torch.int32))
    multi.run([grad], [rule], [AdamSignals()])


@pytest.mark.parametrize("rule", [DECOUPLED, ADDED], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bytes_are_those_of_the_definition(kind: Kind, rule: AdamRule) -> None:
    got = made(kind, SHAPE, NOISE)
    want = twin(got)
    for turn in range(4):
        grad = random(SHAPE, 10 + turn, kind.grad)
        run(got, rule, grad)
        define(want, rule, grad)
        for (name, tensor), (_, expected) in zip(tensors(got), tensors(want), strict=True):
            assert_bitwise(tensor, expected, f"{name} after step {turn}")


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_part_is_updated_as_in_the_whole(kind: Kind) -> None:
    """Rows anywhere, columns at multiples of a block."""
    whole = made(kind, (6, 512), (9, 1, 0, 512, 512))
    rows, cols = slice(2, 5), slice(128, 512)
    part = made(kind, (3, 384), (9, 1, 2 * 512 + 128, 384, 512))
    for (name, own), (_, other) in zip(tensors(part), tensors(whole), strict=True):
        if name in ("value", "remainder"):
            own.copy_(other[rows, cols])
    for turn in range(3):
        grad = random((6, 512), 10 + turn, kind.grad)
        run(whole, DECOUPLED, grad)
        run(part, DECOUPLED, grad[rows, cols].contiguous())
    for (name, own), (_, other) in zip(tensors(part), tensors(whole), strict=True):
        want = other.view(6, 4)[rows, 1:].flatten() if "scale" in name else other
        assert_bitwise(own, want[rows, cols].contiguous() if want.dim() == 2 else want, name)


def test_every_simd_level_writes_the_same_bytes() -> None:
    results, used = [], _C.simd_level()
    try:
        for level in _C.simd_levels():
            _C.set_simd_level(level)
            each = made(Kind(BF16, BYTES, BYTES, keep="stochastic"), (40, 1000), NOISE[:3] + (1000, 1000))
            for turn in range(2):
                run(each, DECOUPLED, random((40, 1000), turn, BF16))
            results.append(each)
    finally:
        _C.set_simd_level(used)
    for result in results[1:]:
        for (name, got), (_, want) in zip(tensors(result), tensors(results[0]), strict=True):
            assert_bitwise(got, want, name)


def test_masters_with_a_remainder_are_fp32_masters() -> None:
    split, plain = made(Kind(BF16, keep="remainder"), SHAPE, NOISE), made(Kind(first=BF16), SHAPE, NOISE)
    master = random(SHAPE, 5)
    code = (master.view(torch.int32).long() + 0x8000) >> 16
    split.value.copy_((code << 16).to(torch.int32).view(torch.float32))
    split.place.remainder.copy_((master.view(torch.int32).long() - (code << 16)).to(torch.int16))
    plain = Adapted(master.clone(), torch.zeros(SHAPE), torch.zeros(SHAPE), torch.zeros(()))
    for turn in range(5):
        grad = random(SHAPE, 20 + turn, BF16)
        for each in (split, plain):
            run(each, DECOUPLED, grad)
    bits = split.value.float().view(torch.int32) + split.place.remainder.int()
    assert_bitwise(bits.view(torch.float32), plain.value, "master")
    assert (split.value.float() - plain.value).abs().max() <= (plain.value.abs().max() / 256)


def test_what_is_rounded_by_chance_is_right_on_average() -> None:
    """Updates below half a step of bf16 are lost to nearest, and arrive by chance."""
    rule = AdamRule(lr=2.0**-11, beta1=0.0, beta2=0.0, eps=0.0, weight_decay=0.0, decoupled=True)
    moved = {}
    for keep in ("stochastic", "nearest"):
        each = made(Kind(BF16, BF16, BF16, keep=keep), (1, 40_000), (0, 0, 0, 40_000, 40_000))
        each.value.fill_(1.5)
        for _ in range(8):
            run(each, rule, torch.ones(1, 40_000, dtype=BF16))
        moved[keep] = (1.5 - each.value.float()).mean().item()
    assert moved["nearest"] == 0
    assert abs(moved["stochastic"] - 8 * 2.0**-11) < 0.02 * 8 * 2.0**-11


def test_second_moments_in_bytes_decay_and_do_not_vanish() -> None:
    """A root that is not 0 stays above 0 beside others that are 2^40 times as large; what is not fed decays."""
    rule = AdamRule(lr=0.0, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.0, decoupled=True)
    each = made(Kind(first=BYTES, second=BYTES), (1, 128), (0, 0, 0, 128, 128))
    grad = torch.full((1, 128), 2.0**-20, dtype=BF16)
    grad[0, 0] = 2.0**20
    run(each, rule, grad)
    assert (each.exp_avg_sq > 0).all()
    first = each.place.exp_avg_sq_scale.clone()
    for _ in range(40):
        run(each, rule, torch.zeros_like(grad))
    want = first * 0.9**20  # of the root
    torch.testing.assert_close(each.place.exp_avg_sq_scale, want, rtol=0.5, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_not_finite_stays_so(kind: Kind, value: float) -> None:
    each = made(kind, SHAPE, NOISE)
    grad = torch.zeros(SHAPE, dtype=kind.grad)
    grad[1, 3] = value
    run(each, DECOUPLED, grad)
    moved = each.value.float()[1, 3]
    assert moved.isnan() if value else moved.isfinite()
    others = each.value[2:].float()
    assert others.isfinite().all()
