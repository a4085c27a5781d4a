"""Logits that are hard to choose from, rules, and what a router makes of them written out in Python and float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from te_dist import ops
from te_dist.ops.route import RoutingRule

RULES = [
    RoutingRule("softmax"),
    RoutingRule("softmax", normalizes=False, factor=2.5),
    RoutingRule("sigmoid"),
    RoutingRule("sigmoid", normalizes=False, num_groups=4, top_groups=2, factor=0.5),
    RoutingRule("softmax", num_groups=5, top_groups=3),
]
# Of whole and broken blocks of eight rows; columns that lanes hold, one for each, and more than they can.
SHAPES = [(70, 40, 8), (9, 140, 3), (1, 20, 1), (17, 500, 9), (3, 1000, 40), (0, 20, 2)]


@dataclass(frozen=True)
class Case:
    """A call of `route`: (rows, columns, choices), the rule, whether there is a bias."""

    shape: tuple[int, int, int]
    rule: RoutingRule
    biased: bool = False

    @property
    def name(self) -> str:
        rows, cols, count = self.shape
        return f"{count} of {cols} in {rows} rows by {self.rule}{', biased' * self.biased}"

    def logits(self) -> Tensor:
        rows, cols, _ = self.shape
        return 2 * torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows * cols))

    def bias(self) -> Tensor | None:
        return torch.linspace(-0.5, 0.5, self.shape[1]).flip(0) if self.biased else None

    def outputs(self, *, whole: bool = True) -> dict[str, Tensor]:
        """Poisoned; `whole`: those too that may be left out."""
        (rows, cols, count), poison = self.shape, -7.0
        found = {"experts": torch.full((rows, count), int(poison)), "probabilities": torch.full((rows, count), poison)}
        more = {"scores": torch.full((rows, cols), poison), "counts": torch.full((cols,), poison)}
        return found | more if whole else found


def hard_logits(rows: int, cols: int) -> Tensor:
    """f32 with equal values, both zeros, infinities and NaN of both signs."""
    generator = torch.Generator().manual_seed(rows * cols)
    x = torch.randint(-9, 10, (rows, cols), generator=generator).float() / 3
    x[::2, ::7], x[1::3, 1::5], x[2::5, 2::9] = 0.0, -0.0, torch.inf
    x[3::7, 3::4], x[4::9, ::6], x[4::9, 1::6] = -torch.inf, torch.nan, -torch.nan
    return x


def raw_scores(logits: Tensor, rule: RoutingRule) -> Tensor:
    """Of each column, as in `rule`; differentiable."""
    return logits.softmax(-1) if rule.score == "softmax" else logits.sigmoid()


def _best(values: list[float], places: list[int], count: int) -> list[int]:
    """Places of the largest values: NaN above all, of equal ones the first."""
    return sorted(places, key=lambda i: (not math.isnan(values[i]), -values[i], i))[:count]


def chosen(scores: Tensor, bias: Tensor | None, rule: RoutingRule, count: int) -> list[list[int]]:
    """Columns of each row that the rule chooses by these scores."""
    size = scores.shape[1] // rule.num_groups
    found = []
    for row in (scores if bias is None else scores + bias).tolist():
        groups = [list(range(g * size, (g + 1) * size)) for g in range(rule.num_groups)]
        sums = [sum(row[i] for i in _best(row, group, 2)) for group in groups]
        best = _best(sums, list(range(rule.num_groups)), rule.top_groups)
        found.append(_best(row, [i for g in best for i in groups[g]], count))
    return found


def probabilities(scores: Tensor, experts: Tensor, rule: RoutingRule) -> Tensor:
    """Of the chosen columns; differentiable."""
    of_chosen = scores.gather(-1, experts)
    return (of_chosen / of_chosen.sum(-1, keepdim=True) if rule.normalizes else of_chosen) * rule.factor


def adding_up(scores: Tensor) -> Tensor:
    """Scores of which those of a row add up to one."""
    return scores / scores.sum(-1, keepdim=True)


def decisions() -> Iterator[tuple[str, Callable[..., None], dict[str, Any], dict[str, Tensor]]]:
    """Name, op, inputs and outputs of calls that decide, and of those that find gradients of that."""
    for shape, rule, biased in product(SHAPES, RULES, (False, True)):
        case, (rows, cols, count) = Case(shape, rule, biased), shape
        logits = case.logits()
        given = dict(logits=logits, rule=rule, bias=case.bias())
        yield f"choice of {case.name}", ops.route, given, case.outputs(whole=biased)
        experts = logits.argsort(dim=1, descending=True)[:, :count].contiguous()
        given = dict(
            logits=logits, rule=rule, experts=experts, grad=torch.linspace(-1, 1, rows * count).view(rows, count)
        )
        given["of_scores"] = torch.linspace(-1, 2, cols) if biased else None
        for width, dtype in ((cols, torch.float32), (2 * cols, torch.bfloat16)):
            out = dict(out=torch.zeros(rows, width, dtype=dtype))
            yield f"{dtype} gradient of {case.name}", ops.route_gradient, given, out
