"""The three matrix multiplications of a linear map, each in the formats of its operands.

[Note: What a linear map saves]
Forward quantizes the input once, into both directions, multiplies the rowwise one and saves the columnwise one: a
single quantized tensor, so that hooks on saved tensors see it as such. The weight is saved as it came in. A quantized
one is the very object that FSDP2 frees and fills again; a plain one is quantized again in backward, columnwise, rather
than kept in two formats. Backward quantizes the gradient once, into the directions that are needed. What is frozen
costs nothing: without wgrad the input is not saved, without dgrad the weight is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_dist.codecs.gemm import READS_ANY_ORDER, Operand, multiply
from te_dist.formats import Direction
from te_dist.quantizers import Quantizer
from te_dist.scaling import delayed
from te_dist.tensor import QuantizedStorage, QuantizedTensor

ROWWISE, COLUMNWISE = Direction.ROWWISE, Direction.COLUMNWISE


@dataclass(frozen=True)
class Plan:
    """How the operands of one linear map are quantized.

    Attributes:
        input, weight, grad_output: by role; `weight` for plain weights only.
        row_multiple: inputs and gradients get rows of zeros up to it, so that no stored byte and no transform is cut.
        moves_histories: whether the end of backward brings delayed scaling up to date.
    """

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    row_multiple: int = 1
    moves_histories: bool = False


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, plan: Plan) -> Tensor:
    """`x` (..., K) times `weight` (N, K) transposed, plus `bias` (N,): (..., N) in the dtype of `x`.

    Args:
        x: plain, or a QuantizedTensor whose rowwise direction is multiplied and whose columnwise one is saved.
        weight: plain or quantized. Its gradient is plain, in its nominal dtype.
    """
    saves_input = torch.is_grad_enabled() and weight.requires_grad
    return _Linear.apply(x, weight, bias, plan, saves_input)


class _Linear(torch.autograd.Function):
    """See [Note: What a linear map saves]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, saves_input: bool) -> Tensor:
        rows = x.shape[:-1].numel()
        inputs = _quantized_input(x, plan, (ROWWISE, COLUMNWISE) if saves_input else (ROWWISE,))
        weights = _quantized_weight(weight, plan, ROWWISE)
        out = multiply(operand(inputs, ROWWISE), operand(weights, ROWWISE), dtype=x.dtype, bias=bias)
        ctx.plan, ctx.shape = plan, x.shape
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        saved = QuantizedTensor(_columnwise_part(inputs)) if saves_input else None
        ctx.save_for_backward(saved, weight if ctx.needs_input_grad[0] else None)
        return _shaped(out, (*x.shape[:-1], weight.shape[0]), rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        inputs, weight = ctx.saved_tensors
        if wants_weight and not isinstance(inputs, QuantizedTensor):
            raise RuntimeError(
                "a forward pass that ran inside of autocast ran again outside of it, after another pass had: torch's "
                "checkpoint needs context_fn=te_dist.recompute.context_fn then; or use te_dist.checkpoint"
            )
        input_dtype, weight_dtype, bias_dtype = ctx.dtypes
        grad_input = grad_weight = grad_bias = None
        directions = (ROWWISE,) * wants_input + (COLUMNWISE,) * wants_weight
        grads = ctx.plan.grad_output.encode(_padded(grad, ctx.plan), *directions) if directions else None
        if wants_input:
            weights = _quantized_weight(weight, ctx.plan, COLUMNWISE)
            product = multiply(operand(grads, ROWWISE), operand(weights, COLUMNWISE), dtype=input_dtype)
            grad_input = _shaped(product, ctx.shape, ctx.shape[:-1].numel())
        if wants_weight:
            grad_weight = multiply(operand(grads, COLUMNWISE), operand(inputs.storage, COLUMNWISE), dtype=weight_dtype)
        if wants_bias:
            grad_bias = _matrix(grad).sum(0, dtype=torch.float32).to(bias_dtype)
        if ctx.plan.moves_histories:
            delayed.update_when_backward_ends()
        return grad_input, grad_weight, grad_bias, None, None


def operand(storage: QuantizedStorage, direction: Direction) -> Operand:
    """`storage` as a product reads it that sums along `direction`.

    A direction that is absent is read from the other one where that holds the same values: as it is on devices that
    read either order, from a transposed copy on the others.

    Raises:
        RuntimeError: the direction is neither present nor a relayout of the one that is.
    """
    source = direction
    if direction not in storage.format or not storage.has(direction):
        if not storage.format.columnwise_is_derivable:
            raise storage.absent(direction)
        if storage.device.type in READS_ANY_ORDER:
            (source,) = storage.directions
        else:
            storage = storage.with_derived(direction)
    return Operand(storage.format[source], storage.stored(source), storage.region, 1 if direction is ROWWISE else 0)


def _quantized_input(x: Tensor, plan: Plan, directions: tuple[Direction, ...]) -> QuantizedStorage:
    if not isinstance(x, QuantizedTensor):
        return plan.input.encode(_padded(x, plan), *directions)
    if x.storage.shape[0] % plan.row_multiple:
        raise ValueError(
            f"a quantized input of {x.storage.shape[0]} rows does not fit the product with the gradient, which takes "
            f"multiples of {plan.row_multiple}; pad it with zeros before quantizing, or pass it unquantized"
        )
    return x.storage


def _quantized_weight(weight: Tensor, plan: Plan, direction: Direction) -> QuantizedStorage:
    return weight.storage if isinstance(weight, QuantizedTensor) else plan.weight.encode(weight, direction)


def _columnwise_part(inputs: QuantizedStorage) -> QuantizedStorage:
    """What wgrad reads of the input, and nothing else."""
    if COLUMNWISE in inputs.directions:
        return inputs.select(COLUMNWISE)
    if inputs.format.columnwise_is_derivable:
        return inputs
    raise ValueError(
        "the gradient of the weight needs the columnwise direction of the quantized input, which has the rowwise one "
        "only; quantize it with columnwise=True, or freeze the weight"
    )


def _padded(x: Tensor, plan: Plan) -> Tensor:
    """`x` (..., K) as a matrix, its rows padded with zeros to a multiple.

    Zeros are exact in every format: they raise no amax, add nothing to wgrad, and the rows they make are dropped.
    """
    matrix = _matrix(x)
    missing = -matrix.shape[0] % plan.row_multiple
    return F.pad(matrix, (0, 0, 0, missing)) if missing else matrix


def _shaped(product: Tensor, shape: Sequence[int], rows: int) -> Tensor:
    """The first `rows` of `product` as `shape`; no view to autograd, since FSDP2 warns of modules that return one."""
    return torch.ops.aten._unsafe_view(product[:rows], shape)


def _matrix(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.dim() > 1 else x[None]
