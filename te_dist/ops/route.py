"""What a router decides: experts and probabilities of rows of logits, and the gradient of these."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Required, TypedDict, Unpack

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.kernels.routing import MOST_GROUPS
from te_dist.kernels.sorting import MOST_EXPERTS
from te_dist.ops._checks import check_choice, check_matrix, check_output, check_packed, takes
from te_dist.ops._library import register
from te_dist.ops._taped import taped

ScoreFunction = Literal["softmax", "sigmoid"]
SCORE_FUNCTIONS: tuple[ScoreFunction, ...] = ("softmax", "sigmoid")


class RoutingRule(NamedTuple):
    """How probabilities come of logits.

    Attributes:
        score: "softmax" of all columns, or "sigmoid" of each.
        normalizes: whether chosen scores are divided by their sum, to which 1e-20 is added.
        num_groups: of columns next to each other, equally many in each; at most 256.
        top_groups: groups of which columns are chosen: those whose two largest scores have the largest sums.
        factor: by which probabilities are multiplied at last.
    """

    score: ScoreFunction
    normalizes: bool = True
    num_groups: int = 1
    top_groups: int = 1
    factor: float = 1.0


class Decided(TypedDict, total=False):
    """What `route` writes, as keywords.

    experts: int64 (rows, k): the columns; k at most as many as can be chosen.
    probabilities: f32 (rows, k): their scores, divided by their sum where the rule says so, times the factor.
    scores: f32 (rows, cols), all scores; of sigmoids divided by their sum. None: they are not kept.
    counts: f32 (cols,): how often each column was chosen, exact below 2^24; None: nobody counts.
    """

    experts: Required[Tensor]
    probabilities: Required[Tensor]
    scores: Tensor | None
    counts: Tensor | None


@taped
@takes(Decided)
def route(logits: Tensor, *, rule: RoutingRule, bias: Tensor | None = None, **decided: Unpack[Decided]) -> None:
    """Chooses the k columns of the largest `score + bias` in each row, the largest first, of equal ones the leftmost.

    Computed in fp32, by the same polynomials on CPU and GPU. Column c of a row is added to sum number c % 32, from left
    to right; these are folded in pairs at distances 16, 8, 4, 2, 1. So are chosen scores, in their order. Scores of a
    softmax below e^-87.7 are zeros.

    Args:
        logits: f32 (rows, cols), contiguous, of at most 8192 columns. A score of NaN is larger than all numbers.
        rule: how scores and probabilities are found.
        bias: f32 (cols,), contiguous; None for zeros.
        decided: what is written.
    """
    experts, probabilities = decided["experts"], decided["probabilities"]
    scores, counts = decided.get("scores"), decided.get("counts")
    check_matrix("logits", logits, (torch.float32,))
    rows, cols = logits.shape
    found = experts.shape[1] if experts.dim() == 2 else 0  # noqa: PLR2004
    _check_rule(rule, cols, found)
    if bias is not None:
        check_packed("bias", bias, (torch.float32,), (cols,))
    check_output("experts", experts, torch.int64, (rows, found))
    check_output("probabilities", probabilities, torch.float32, (rows, found))
    for name, output, shape in (("scores", scores, (rows, cols)), ("counts", counts, (cols,))):
        if output is not None:
            check_output(name, output, torch.float32, shape)
    torch.ops.te_dist.route(logits, bias, *rule, experts, probabilities, scores, counts)


@taped
def route_gradient(
    logits: Tensor,
    *,
    rule: RoutingRule,
    experts: Tensor,
    grad: Tensor,
    of_scores: Tensor | None = None,
    out: Tensor,
) -> None:
    """The gradient of the logits that `route` was given.

    Args:
        logits: f32 (rows, cols), contiguous.
        rule: that of `route`.
        experts: int64 (rows, k), contiguous, which were chosen: below `cols`, different ones in a row.
        grad: f32 (rows, k), contiguous: the gradient of the probabilities.
        of_scores: f32 (cols,): of every row of the scores that `route` keeps; None for zeros.
        out: f32 (rows, cols); or bf16 (rows, 2 cols), the leading bits of each gradient and, to the right of all those,
            the bits that follow: what the first bf16 lacks. NaN is any NaN.
    """
    check_matrix("logits", logits, (torch.float32,))
    rows, cols = logits.shape
    found = experts.shape[1] if experts.dim() == 2 else 0  # noqa: PLR2004
    _check_rule(rule, cols, found)
    check_packed("experts", experts, (torch.int64,), (rows, found))
    check_packed("grad", grad, (torch.float32,), (rows, found))
    if of_scores is not None:
        check_packed("of_scores", of_scores, (torch.float32,), (cols,))
    in_halves = out.dtype == torch.bfloat16
    check_output("out", out, out.dtype if in_halves else torch.float32, (rows, 2 * cols if in_halves else cols))
    how = rule.score, rule.normalizes, rule.factor
    torch.ops.te_dist.route_gradient(logits, experts, grad, of_scores, *how, out)


def _check_rule(rule: RoutingRule, cols: int, found: int) -> None:
    check_choice("score", rule.score, SCORE_FUNCTIONS)
    if not 0 < cols <= MOST_EXPERTS:
        raise ValueError(f"logits: got {cols} columns, wanted 1 to {MOST_EXPERTS}")
    if not 1 <= rule.top_groups <= rule.num_groups <= MOST_GROUPS or cols % rule.num_groups:
        raise ValueError(
            f"rule: got {rule.top_groups} of {rule.num_groups} groups of {cols} columns, wanted groups of equal size, "
            f"at most {MOST_GROUPS}, and 1 of them or more"
        )
    reachable = cols // rule.num_groups * rule.top_groups
    if found > reachable:
        raise ValueError(f"experts: got {found} columns, wanted at most the {reachable} that can be chosen")


def _route_cpu(logits: Tensor, bias: Tensor | None, *rest: Any) -> None:
    *rule, experts, probabilities, scores, counts = rest
    _C.route(logits, bias, tuple(rule), (experts, probabilities, scores, counts), torch.get_num_threads())


def _gradient_cpu(logits: Tensor, experts: Tensor, grad: Tensor, of_scores: Tensor | None, *rest: Any) -> None:
    score, normalizes, factor, out = rest
    rule = (score, normalizes, 1, 1, factor)
    _C.route_gradient(logits, experts, grad, of_scores, rule, out, torch.get_num_threads())


register(
    "route(Tensor logits, Tensor? bias, str score, bool normalizes, int num_groups, int top_groups, float factor, "
    "Tensor(a!) experts, Tensor(b!) probabilities, Tensor(c!)? scores, Tensor(d!)? counts) -> ()",
    _route_cpu,
    kernels.route,
)
register(
    "route_gradient(Tensor logits, Tensor experts, Tensor grad, Tensor? of_scores, str score, bool normalizes, "
    "float factor, Tensor(a!) out) -> ()",
    _gradient_cpu,
    kernels.route_gradient,
)
