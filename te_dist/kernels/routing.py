"""Launches of what a router decides. Arguments are those of the ops, in the order of their schemas."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from te_dist.kernels.amax import zero
from te_dist.kernels.arguments import pointer
from te_dist.kernels.runtime import launch
from te_dist.kernels.spec import Layout, Spec, once

SCORES = {"softmax": "Score::kSoftmax", "sigmoid": "Score::kSigmoid"}
HELD = (4, 8, 16, 0)  # columns that a lane can hold; 0 for any number, which it does not hold
MOST_GROUPS = 256
_LANES, _ROWS = 32, 8  # of a warp, which takes a row; of a block of threads
_ROUTE = Layout(
    "logits:P bias:P rows:q cols:q count:q num_groups:q top_groups:q normalizes:q factor:f experts:P probabilities:P "
    "scores:P counts:P"
)
_GRADIENT = Layout(
    "logits:P experts:P grad:P of_scores:P rows:q cols:q count:q normalizes:q factor:f in_halves:i out:P"
)


@once
def choice(score: str, held: int) -> Spec:
    """Spec of what chooses. `held`: columns of a lane, of `HELD`."""
    return Spec("routing.cuh", f"Route<{SCORES[score]}, {held}>", _ROUTE)


@once
def gradient(score: str, held: int) -> Spec:
    """Spec of what finds gradients of logits. `held`: columns of a lane, of `HELD`."""
    return Spec("routing.cuh", f"RouteGradient<{SCORES[score]}, {held}>", _GRADIENT)


def variants() -> list[Spec]:
    """All of them."""
    return [make(score, held) for make, score, held in product((choice, gradient), SCORES, HELD)]


def route(logits: Tensor, bias: Tensor | None, *rest: Any) -> None:
    """See te_dist.ops.route."""
    score, normalizes, num_groups, top_groups, factor, experts, probabilities, *recorded = rest
    (rows, cols), count = logits.shape, experts.shape[1]
    if recorded[1] is not None:
        zero(recorded[1])
    if not rows:
        return
    rule = (num_groups, top_groups, normalizes, factor)
    outputs = (experts.data_ptr(), probabilities.data_ptr(), *map(pointer, recorded))
    values = (logits.data_ptr(), pointer(bias), rows, cols, count, *rule, *outputs)
    launch(choice(score, _held(cols)), logits, (-(-rows // _ROWS), 1), values)


def route_gradient(logits: Tensor, experts: Tensor, grad: Tensor, of_scores: Tensor | None, *rest: Any) -> None:
    """See te_dist.ops.route_gradient."""
    score, normalizes, factor, out = rest
    (rows, cols), count = logits.shape, experts.shape[1]
    if not rows:
        return
    read = (logits.data_ptr(), experts.data_ptr(), grad.data_ptr(), pointer(of_scores))
    values = (*read, rows, cols, count, normalizes, factor, out.dtype == torch.bfloat16, out.data_ptr())
    launch(gradient(score, _held(cols)), logits, (-(-rows // _ROWS), 1), values)


def _held(cols: int) -> int:
    return next(held for held in HELD if cols <= _LANES * held or held == 0)
