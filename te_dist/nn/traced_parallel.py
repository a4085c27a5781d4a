"""Linear maps that tensor parallelism cuts under torch.compile, with what ranks send each other exchange them.

See [Note: Parallel layers in graphs]. What is gathered or summed for one map alone is part of its function of autograd,
so that nothing quantized leaves it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_dist.nn import traced
from te_dist.nn.once import torch_once_differentiable
from te_dist.tensor_parallel.traced import Gathering, part_of_sum, quantized, whole_sum


class Exchange(NamedTuple):
    """What ranks send each other around a product.

    Attributes:
        group: name of that of the ranks.
        gathers: dimension along which inputs are gathered, and their gradients summed and cut.
        scatters: dimension along which outputs are summed and cut, and their gradients gathered.
        sums: whether outputs are summed, for every rank.
    """

    group: str
    gathers: int | None = None
    scatters: int | None = None
    sums: bool = False


@torch.compiler.allow_in_graph
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, plan: str, exchange: tuple[Any, ...]) -> Tensor:
    """As `traced.linear`, with the `Exchange` around it."""
    differentiates = torch.is_grad_enabled()
    return _Linear.apply(x, weight, bias, plan, Exchange(*exchange), differentiates and weight.requires_grad)


class _Linear(torch.autograd.Function):
    """As that of `traced`, between collectives."""

    @staticmethod
    def forward(  # noqa: PLR0913  (what autograd hands over)
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: str, exchange: Exchange, trains: bool
    ) -> Tensor:
        if exchange.gathers is not None:
            x = quantized(x, Gathering(plan, "input", (True, trains), True, exchange.group, exchange.gathers))
        out, saved = traced.forward_op(x, weight, bias, plan=plan, how=(trains, ctx.needs_input_grad[0], ""))
        ctx.plan, ctx.exchange, ctx.shape = plan, exchange, x.shape
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(*saved, weight)
        if exchange.scatters is not None:
            return part_of_sum(out, exchange.group, exchange.scatters)
        return whole_sum(out, exchange.group) if exchange.sums else out

    @staticmethod
    @torch_once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (*inputs, weight), exchange, wants = ctx.saved_tensors, ctx.exchange, ctx.needs_input_grad[:3]
        if exchange.scatters is not None:
            how = ctx.plan, "grad_output", wants[:2], True, exchange.group, exchange.scatters
            grad = quantized(grad, Gathering(*how))
        of_x, *others = traced.backward_op(grad, inputs, weight, of=(ctx.plan, wants, ctx.shape, ctx.dtypes))
        if of_x is not None and exchange.gathers is not None:
            of_x = part_of_sum(of_x, exchange.group, exchange.gathers)
        return of_x, *others, None, None, None
