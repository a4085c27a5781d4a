"""What a router decides by the kernels for CUDA, simulated: the bits of the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from te_dist import ops
from te_dist.ops.route import RoutingRule
from te_dist.testing import assert_bitwise
from tests.ops.routing import Case, chosen, hard_logits, raw_scores
from tests.ops.test_routing import CASES

PICKED = [case for case in CASES if case.shape[0] < 20]


@pytest.mark.parametrize("case", PICKED, ids=lambda case: case.name)
def test_bits_are_those_of_the_cpu(case: Case, request) -> None:
    logits, want, got = case.logits(), case.outputs(), case.outputs()
    ops.route(logits, rule=case.rule, bias=case.bias(), **want)
    grad = torch.randn(want["probabilities"].shape, generator=torch.Generator().manual_seed(1))
    given = dict(rule=case.rule, experts=want["experts"], grad=grad)
    if case.biased:
        given["of_scores"] = torch.linspace(-1, 2, case.shape[1])
    here = [torch.full_like(logits, -7.0), torch.full_like(logits.repeat(1, 2), -7.0, dtype=torch.bfloat16)]
    there = [out.clone() for out in here]
    for out in here:
        ops.route_gradient(logits, **given, out=out)
    request.getfixturevalue("simulated")
    ops.route(logits, rule=case.rule, bias=case.bias(), **got)
    for name in want:
        assert_bitwise(got[name], want[name], name)
    for simulated, wanted in zip(there, here, strict=True):
        ops.route_gradient(logits, **given, out=simulated)
        assert_bitwise(simulated, wanted, "gradient")


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize(("rows", "cols", "count"), [(18, 40, 8), (9, 132, 3), (5, 1000, 6)])
def test_scores_that_are_equal_infinite_or_no_numbers_are_in_order(
    rows: int, cols: int, count: int, groups: tuple[int, int]
) -> None:
    case = Case((rows, cols, count), RoutingRule("sigmoid", True, *groups), biased=True)
    for its in (case, replace(case, biased=False)):
        logits, outputs = hard_logits(rows, cols), its.outputs(whole=False)
        ops.route(logits, rule=its.rule, bias=its.bias(), **outputs)
        assert outputs["experts"].tolist() == chosen(raw_scores(logits, its.rule), its.bias(), its.rule, count)
