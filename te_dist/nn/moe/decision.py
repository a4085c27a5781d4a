"""From tokens to experts and probabilities in one step, and back.

[Note: One step from tokens to experts]
Logits, scores, choice, probabilities and what balances them are found in one step, and so are the gradients: where
there are few tokens, two dozen small ops of torch take the CPU longer than the experts take the GPU. Saved are the
tokens, the logits and the chosen experts; scores are found again.

[Note: fp32 from bf16]
Products of bf16 values are exact in fp32, so that on a GPU tensor cores give fp32 logits of bf16 tokens without a copy
in fp32. In backward one operand is fp32: it comes as two bf16 values, whose products are added up by the same sum, off
by 2^-17 of a value at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from te_dist import ops
from te_dist.kernels.tape import Tapes
from te_dist.nn.moe.routing import Routing, balancing_weights
from te_dist.nn.once import once_differentiable

_WORKSPACE = 8 << 20  # bytes, in which parts of the gradient of a weight are added up
_tapes = Tapes(max_tapes=1024)


class Asked(NamedTuple):
    """What a router is asked for.

    Attributes:
        routing: how it chooses.
        scale: of the gradient of the balancing loss; None without that loss.
        counts: whether choices are counted.
    """

    routing: Routing
    scale: float | None
    counts: bool


def decide(x: Tensor, weight: Tensor, bias: Tensor | None, *, asked: Asked) -> tuple[Tensor, ...]:
    """(probabilities f32 (T, k), experts int64 (T, k)), then counts f32 (E,) and the balancing loss where asked for.

    Probabilities are differentiable, and bring the gradient of the loss along.

    Args:
        x: (T, H), tokens.
        weight: (E, H).
        bias: f32 (E,), added to scores for the choice; None for zeros.
        asked: for what.
    """
    return _Decide.apply(x.contiguous(), weight, bias, asked)


def choose(logits: Tensor, bias: Tensor | None, routing: Routing, **more: Tensor | None) -> tuple[Tensor, Tensor]:
    """(experts, probabilities) of `logits` (T, E); `more`: further outputs of `ops.route`."""
    shape = logits.shape[0], routing.top_k
    experts, probabilities = (torch.empty(shape, dtype=t, device=logits.device) for t in (torch.int64, torch.float32))
    ops.route(logits, rule=routing.rule, bias=bias, experts=experts, probabilities=probabilities, **more)
    return experts, probabilities


def rehearse(weight: Tensor, bias: Tensor | None, routing: Routing) -> None:
    """Launches what decides, and its gradients, on tensors without values, see `rehearsal.rehearse`."""
    experts, hidden = weight.shape
    logits = torch.empty(1, experts, dtype=torch.float32, device="meta")
    chosen, probabilities = choose(logits, bias, routing)
    halves = torch.empty(1, 2 * experts, dtype=torch.bfloat16, device="meta")
    ops.route_gradient(logits, rule=routing.rule, experts=chosen, grad=probabilities, out=halves)
    if weight.dtype == torch.bfloat16:
        _of_tokens(halves, torch.empty_like(weight, device="meta"))
        _of_weight(halves, halves.new_empty(1, hidden))


class _Decide(torch.autograd.Function):
    """See [Note: One step from tokens to experts]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, asked: Asked) -> tuple[Tensor, ...]:
        given = (x, weight) if bias is None else (x, weight, bias)
        logits, probabilities, experts, *found = _taped(
            ("forward", asked), given, lambda: _decided(x, weight, bias, asked)
        )
        weights = () if asked.scale is None else (found.pop(),)
        ctx.save_for_backward(x, weight, logits, experts, *weights)
        ctx.asked = asked
        ctx.mark_non_differentiable(experts, *found)
        return probabilities, experts, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, logits, experts, *weights = ctx.saved_tensors
        wants, grad = tuple(ctx.needs_input_grad[:2]), grad.contiguous()
        given = (grad, x, weight, logits, experts, *weights)
        found = _taped(("backward", ctx.asked, wants), given, lambda: _gradients(given, ctx.asked, wants))
        of_x, of_weight = (found.pop(0) if each else None for each in wants)
        return of_x, of_weight, None, None


def _taped(key: Any, given: tuple[Tensor, ...], function: Callable[[], tuple[Tensor, ...]]) -> list[Tensor]:
    """What `function` of the tensors `given` returns."""
    if torch.compiler.is_compiling():
        return list(function())
    return list(_tapes.run(key, given, lambda: (function(), None))[0])


def _decided(x: Tensor, weight: Tensor, bias: Tensor | None, asked: Asked) -> tuple[Tensor, ...]:
    """(logits, probabilities, experts), counts where asked for, loss and weights of the scores where that is."""
    if _multiplies_bf16(x, weight):
        logits = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
        ops.gemm_half(x, weight, summed_dims=(1, 1), out=logits)
    else:
        logits = F.linear(x.float(), weight.float())
    counts = torch.zeros(weight.shape[0], dtype=torch.float32, device=x.device) if asked.counts else None
    scores = None if asked.scale is None else torch.empty_like(logits)
    experts, probabilities = choose(logits, bias, asked.routing, counts=counts, scores=scores)
    found = logits, probabilities, experts
    if counts is None:
        return found
    if scores is None:
        return *found, counts
    weights = balancing_weights(counts, x.shape[0], asked.routing)
    return *found, counts, (weights * scores.sum(0)).sum(), weights * asked.scale


def _gradients(given: Sequence[Tensor], asked: Asked, wants: tuple[bool, ...]) -> tuple[Tensor, ...]:
    """Those of `x` and `weight` that are wanted. See [Note: fp32 from bf16]."""
    grad, x, weight, logits, experts, *weights = given
    (rows, cols), in_halves = logits.shape, _multiplies_bf16(x, weight)
    shape, dtype = ((rows, 2 * cols), torch.bfloat16) if in_halves else ((rows, cols), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    of_scores = weights[0] if weights else None
    ops.route_gradient(logits, rule=asked.routing.rule, experts=experts, grad=grad, of_scores=of_scores, out=out)
    if in_halves:
        return *([_of_tokens(out, weight)] if wants[0] else []), *([_of_weight(out, x)] if wants[1] else [])
    of_x = [(out @ weight.float()).to(x.dtype)] if wants[0] else []
    return *of_x, *([(out.t() @ x.float()).to(weight.dtype)] if wants[1] else [])


def _of_tokens(halves: Tensor, weight: Tensor) -> Tensor:
    """bf16 (T, H): both halves (T, 2 E) of the gradient of logits times `weight` (E, H)."""
    rows, (experts, cols) = halves.shape[0], weight.shape
    twice = torch.empty(2 * experts, cols, dtype=weight.dtype, device=weight.device)
    ops.assemble((weight, weight), row_starts=(0, experts), col_starts=(0, 0), out=twice)
    out = torch.empty(rows, cols, dtype=weight.dtype, device=weight.device)
    ops.gemm_half(halves, twice, summed_dims=(1, 0), out=out)
    return out


def _of_weight(halves: Tensor, x: Tensor) -> Tensor:
    """bf16 (E, H): the gradient of logits, by both of its halves (T, 2 E), times `x` (T, H)."""
    both = torch.empty(halves.shape[1], x.shape[1], dtype=torch.float32, device=x.device)
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=x.device)
    ops.gemm_half(halves, x, summed_dims=(0, 0), workspace=workspace, out=both)
    out = torch.empty(halves.shape[1] // 2, x.shape[1], dtype=x.dtype, device=x.device)
    ops.add_halves(both, out=out)
    return out


def _multiplies_bf16(x: Tensor, weight: Tensor) -> bool:
    return x.is_cuda and x.dtype == weight.dtype == torch.bfloat16
