"""From tokens to experts and probabilities in one step, and back.

[Note: One step from tokens to experts]
Logits, scores, choice, probabilities and what balances them are found in one step, and so are the gradients: where
there are few tokens, two dozen small ops of torch take the CPU longer than the experts take the GPU. Saved are tokens
and weight, the logits, the chosen experts, and weights of the balancing loss; scores are found again.

[Note: fp32 from bf16]
Products of bf16 values are exact in fp32, so that on a GPU tensor cores give fp32 logits of bf16 tokens without a copy
in fp32. In backward one operand is fp32: it comes as two bf16 values, whose products are added up by the same sum, off
by 2^-17 of a value at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from te_dist import ops
from te_dist.kernels.tape import Tapes
from te_dist.nn.moe.routing import Routing, balancing_weights
from te_dist.nn.once import once_differentiable
from te_dist.ops.route import RoutingRule

_WORKSPACE = 8 << 20  # bytes, in which parts of the gradient of a weight are added up
_tapes = Tapes(max_tapes=1024)


class Asked(NamedTuple):
    """What a router is asked for.

    Attributes:
        routing: how it chooses.
        counts: whether choices are counted.
        loss: whether the balancing loss is; with counts only.
    """

    routing: Routing
    counts: bool = False
    loss: bool = False


def decide(x: Tensor, weight: Tensor, bias: Tensor | None, *, asked: Asked, scale: float = 1.0) -> tuple[Tensor, ...]:
    """(probabilities f32 (T, k), experts int64 (T, k)), then counts f32 (E,) and the balancing loss where asked for.

    Probabilities are differentiable, once, and bring the gradient of the loss along. Torch's autocast means nothing.

    Args:
        x: (T, H), tokens.
        weight: (E, H).
        bias: f32 (E,), added to scores for the choice; None for zeros.
        asked: for what.
        scale: by which the gradient of the balancing loss is multiplied.
    """
    return _Decide.apply(_with_rows(x), _with_rows(weight), bias, asked, scale)


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
    def forward(  # noqa: PLR0913  (what autograd hands over)
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, asked: Asked, scale: float
    ) -> tuple[Tensor, ...]:
        given = (x, weight) if bias is None else (x, weight, bias)
        with _without_autocast(x.device.type):
            logits, probabilities, experts, *found = _taped(asked, given, lambda: _decided(x, weight, bias, asked))
        found, weights = (found[:-1], found[-1:]) if asked.loss else (found, ())  # in graphs a tuple
        ctx.save_for_backward(
            x, weight, logits, experts, *(weights if scale == 1 else [each * scale for each in weights])
        )
        ctx.rule = asked.routing.rule
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(experts, *found)
        return probabilities, experts, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:  # nothing came of the probabilities
            return (None,) * len(ctx.needs_input_grad)
        x, weight, logits, experts, *weights = ctx.saved_tensors
        wants, rule = tuple(ctx.needs_input_grad[:2]), ctx.rule
        # NOTE: asked in front of the block, of which a compiler that does not know it yet would never leave.
        grad = grad if grad.is_contiguous() else grad.contiguous()
        given = (grad, x, weight, logits, experts, *weights)
        with _without_autocast(x.device.type):
            found = _taped((rule, wants), given, lambda: _gradients(given, rule, wants))
        of_x, of_weight = (found.pop(0) if each else None for each in wants)
        return of_x, of_weight, None, None, None


def _with_rows(matrix: Tensor) -> Tensor:
    """The same values; rows are contiguous, and lie apart."""
    pitch, step = matrix.stride()
    return matrix if step == 1 and pitch >= matrix.shape[1] else matrix.contiguous()


def _without_autocast(kind: str) -> AbstractContextManager[Any]:
    """A block in which torch's autocast is off on devices of a kind; of a graph, whatever surrounds it when it runs."""
    if kind != "meta" and (torch.compiler.is_compiling() or torch.is_autocast_enabled(kind)):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def _taped(key: Any, given: tuple[Tensor, ...], function: Callable[[], tuple[Tensor, ...]]) -> list[Tensor]:
    """What `function` of the tensors `given` returns."""
    return list(_tapes.run(key, given, lambda: (function(), None))[0])


def _decided(x: Tensor, weight: Tensor, bias: Tensor | None, asked: Asked) -> tuple[Tensor, ...]:
    """(logits, probabilities, experts), counts where asked for, and with them loss and weights of scores."""
    if _multiplies_bf16(x, weight):
        logits = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
        ops.gemm_half(x, weight, summed_dims=(1, 1), out=logits)
    else:
        logits = F.linear(x.float(), weight.float())
    counts = torch.empty(weight.shape[0], dtype=torch.float32, device=x.device) if asked.counts else None
    scores = torch.empty_like(logits) if asked.loss else None
    experts, probabilities = choose(logits, bias, asked.routing, counts=counts, scores=scores)
    found = logits, probabilities, experts
    if counts is None:
        return found
    if scores is None:
        return *found, counts
    weights = balancing_weights(counts, x.shape[0], asked.routing)
    return *found, counts, (weights * scores.sum(0)).sum(), weights


def _gradients(given: Sequence[Tensor], rule: RoutingRule, wants: tuple[bool, ...]) -> tuple[Tensor, ...]:
    """Those of `x` and `weight` that are wanted. See [Note: fp32 from bf16]."""
    grad, x, weight, logits, experts, *weights = given
    (rows, cols), in_halves = logits.shape, _multiplies_bf16(x, weight)
    shape, dtype = ((rows, 2 * cols), torch.bfloat16) if in_halves else ((rows, cols), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    of_scores = weights[0] if weights else None
    ops.route_gradient(logits, rule=rule, experts=experts, grad=grad, of_scores=of_scores, out=out)
    found = []
    if wants[0]:
        found.append(_of_tokens(out, weight) if in_halves else (out @ weight.float()).to(x.dtype))
    if wants[1]:
        found.append(_of_weight(out, x) if in_halves else (out.t() @ x.float()).to(weight.dtype))
    return tuple(found)


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
    ops.add_parts(both, out=out)
    return out


def _multiplies_bf16(x: Tensor, weight: Tensor) -> bool:
    return x.is_cuda and x.dtype == weight.dtype == torch.bfloat16
