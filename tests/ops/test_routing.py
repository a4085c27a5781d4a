"""What a router decides, against its rules written out, and gradients against those of autograd in float64."""

from __future__ import annotations

import threading
from itertools import product

import pytest
import torch
from torch import Tensor

from te_dist import _C, ops
from te_dist.ops.route import RoutingRule
from te_dist.testing import assert_bitwise
from tests.ops.routing import RULES, SHAPES, Case, adding_up, chosen, hard_logits, probabilities, raw_scores

CASES = [Case(shape, rule, biased) for shape, rule, biased in product(SHAPES, RULES, (False, True))]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def close(got: Tensor, want: Tensor, tolerance: float = 2e-6) -> bool:
    """Whether the largest difference is small beside the largest value."""
    return got.numel() == 0 or float((got - want).abs().max()) <= tolerance * max(1e-3, float(want.abs().max()))


@every_case
def test_choices_and_probabilities_are_those_of_the_rule(case: Case) -> None:
    logits, bias, outputs = case.logits(), case.bias(), case.outputs()
    ops.route(logits, rule=case.rule, bias=bias, **outputs)
    scores, experts = raw_scores(logits.double(), case.rule), outputs["experts"]
    assert experts.tolist() == chosen(scores, bias, case.rule, case.shape[2])
    assert close(outputs["probabilities"], probabilities(scores, experts, case.rule))
    assert close(outputs["scores"], adding_up(scores))
    assert outputs["counts"].tolist() == torch.bincount(experts.flatten(), minlength=case.shape[1]).tolist()


@every_case
def test_what_may_be_left_out_changes_nothing(case: Case) -> None:
    whole, less = case.outputs(), case.outputs(whole=False)
    for outputs in (whole, less):
        ops.route(case.logits(), rule=case.rule, bias=case.bias(), **outputs)
    for name, want in less.items():
        assert_bitwise(whole[name], want, name)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "cols", "count"), [(70, 40, 8), (9, 132, 3), (33, 32, 15), (5, 1000, 6)])
def test_scores_that_are_equal_infinite_or_no_numbers_are_in_order(
    rows: int, cols: int, count: int, biased: bool, groups: tuple[int, int]
) -> None:
    case = Case((rows, cols, count), RoutingRule("sigmoid", True, *groups), biased)
    logits, outputs = hard_logits(rows, cols), case.outputs(whole=False)
    ops.route(logits, rule=case.rule, bias=case.bias(), **outputs)
    scores = raw_scores(logits, case.rule)
    assert outputs["experts"].tolist() == chosen(scores, case.bias(), case.rule, count)


def test_rows_of_nan_choose_different_experts() -> None:
    case = Case((2, 6, 4), RoutingRule("softmax"))
    outputs = case.outputs(whole=False)
    ops.route(torch.full((2, 6), torch.nan), rule=case.rule, **outputs)
    assert outputs["experts"].tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("balanced", [False, True])
@every_case
def test_gradients_are_those_of_autograd(case: Case, balanced: bool) -> None:
    logits, outputs = case.logits(), case.outputs(whole=False)
    ops.route(logits, rule=case.rule, bias=case.bias(), **outputs)
    grad = torch.randn(outputs["probabilities"].shape, generator=torch.Generator().manual_seed(1))
    of_scores = torch.linspace(-1, 2, case.shape[1]) if balanced else None
    got = torch.full_like(logits, -7.0)
    given = dict(rule=case.rule, experts=outputs["experts"], grad=grad, of_scores=of_scores)
    ops.route_gradient(logits, **given, out=got)
    asking = logits.double().requires_grad_()
    scores = raw_scores(asking, case.rule)
    down = (probabilities(scores, outputs["experts"], case.rule) * grad).sum()
    (down + (adding_up(scores) * of_scores).sum() if balanced else down).backward()
    assert close(got, asking.grad, 1e-5)
    halves = torch.full((logits.shape[0], 2 * logits.shape[1]), -7.0, dtype=torch.bfloat16)
    ops.route_gradient(logits, **given, out=halves)
    leading, rest = halves.chunk(2, dim=1)
    assert_bitwise(leading, got.bfloat16(), "leading bits")
    assert_bitwise(rest, (got - leading).bfloat16(), "what follows")


@pytest.mark.parametrize("level", _C.simd_levels())
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_simd_level_writes_the_same_bits(rule: RoutingRule, level: str) -> None:
    case, before, found = Case((17, 500, 9), rule, True), _C.simd_level(), []
    for its in (before, level):
        outputs, out = case.outputs(), torch.full((17, 500), -7.0)
        try:
            _C.set_simd_level(its)
            ops.route(case.logits(), rule=rule, bias=case.bias(), **outputs)
            grad = torch.linspace(-1, 1, 17 * 9).view(17, 9)
            given = dict(experts=outputs["experts"], grad=grad, of_scores=torch.linspace(-1, 2, 500))
            ops.route_gradient(case.logits(), rule=rule, **given, out=out)
        finally:
            _C.set_simd_level(before)
        found.append(outputs | {"gradient": out})
    for name, want in found[0].items():
        assert_bitwise(found[1][name], want, name)


def test_threads_of_small_stacks_decide() -> None:
    case, before = Case((3, 8192, 4), RULES[0]), threading.stack_size(64 << 10)
    outputs = case.outputs()
    try:
        thread = threading.Thread(target=lambda: ops.route(case.logits(), rule=case.rule, **outputs))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert (outputs["experts"] >= 0).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logits": torch.zeros(3, 4, dtype=torch.float64)}, "logits: "),
        ({"logits": torch.zeros(3, 8193)}, "wanted 1 to 8192"),
        ({"rule": RoutingRule("relu")}, "score: got 'relu'"),
        ({"rule": RoutingRule("softmax", True, 3, 1)}, "got 1 of 3 groups of 4 columns"),
        ({"rule": RoutingRule("softmax", True, 2, 3)}, "got 3 of 2 groups of 4 columns"),
        ({"rule": RoutingRule("softmax", True, 4, 1)}, "got 2 columns, wanted at most the 1"),
        ({"bias": torch.zeros(5)}, "bias: "),
        ({"experts": torch.zeros(3, 5, dtype=torch.int64)}, "got 5 columns, wanted at most the 4"),
        ({"experts": torch.zeros(3, 2, dtype=torch.int32)}, "experts: "),
        ({"probabilities": torch.zeros(3, 1)}, "probabilities: "),
        ({"scores": torch.zeros(3, 5)}, "scores: "),
        ({"counts": torch.zeros(4, dtype=torch.int64)}, "counts: "),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict, words: str) -> None:
    case = Case((3, 4, 2), RoutingRule("softmax"))
    given = {"logits": torch.zeros(3, 4), "rule": case.rule, **case.outputs()} | changes
    with pytest.raises(ValueError, match=words):
        ops.route(given.pop("logits"), **given)


def test_gradients_that_do_not_fit_are_refused() -> None:
    given = dict(rule=RULES[0], experts=torch.zeros(3, 2, dtype=torch.int64), grad=torch.zeros(3, 2))
    for changes, words in (
        ({"grad": torch.zeros(3, 3)}, "grad: "),
        ({"of_scores": torch.zeros(3)}, "of_scores: "),
        ({"out": torch.zeros(3, 8)}, "out: "),
        ({"out": torch.zeros(3, 4, dtype=torch.bfloat16)}, "out: "),
    ):
        with pytest.raises(ValueError, match=words):
            ops.route_gradient(torch.zeros(3, 4), **(given | {"out": torch.zeros(3, 4)} | changes))
