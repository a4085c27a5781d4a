"""The matrix multiplications of linear maps of rows in groups, each group by a matrix of its own.

What is saved is what [Note: What a linear map saves] says: the input columnwise, quantized once, as one tensor; the
weight as it came in. Where the groups lie is read from a table on the device, see [Note: What products in groups wait
for], which is saved beside. The gradient of all matrices is one tensor, (G, N, K).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from te_dist._torch_private import applied, is_executed
from te_dist.codecs.grouped_gemm import Result, Rows, SumsResult, multiply_rows, multiply_sums
from te_dist.formats import Direction
from te_dist.grouped import GroupedStorage
from te_dist.nn.buffers import overlap
from te_dist.nn.group_fronts import GroupEpilogue, GroupFront, clear_rest
from te_dist.nn.grouped_reading import Gradient, operand, put_together, read_gradient
from te_dist.nn.grouped_weights import MainGrads, as_one, members_of, shape_of, stacked, together
from te_dist.nn.left_gradients import LeftGradients
from te_dist.nn.once import once_differentiable
from te_dist.nn.plan import Plan
from te_dist.nn.products import directions_of, taken_apart
from te_dist.nn.saved import let_go, save, saved
from te_dist.ops.evaluate import values
from te_dist.ops.source import Source, unsummed
from te_dist.quantizers import IdentityQuantizer
from te_dist.tensor import GroupedRows, QuantizedStorage, QuantizedTensor, StorageKind

ROWWISE, COLUMNWISE = BOTH = Direction.ROWWISE, Direction.COLUMNWISE
_Tensors = Sequence[Tensor]
_Operands = tuple[_Tensors, _Tensors, _Tensors, _Tensors]  # weights, biases, beside the input, behind the product
_CONSTANTS = 4  # arguments of `_GroupedLinear` in front of weights


class Given(NamedTuple):
    """What a call of `grouped_linear` is given besides differentiable tensors.

    Attributes:
        table: int32 (4, G + 1), see `nn.GroupTable`; of as many rows as the input has.
        plan: how operands are quantized.
        front: what of the input is multiplied; None for itself.
        epilogue: what becomes of the rows of the output; None where they are it. Not with a caller's `out`.
        hands_to: the front of the map that reads the rows, whose gradient is found here, see [Note: Fronts of the map
            behind]; None where there is no such map. Neither with an epilogue nor with a caller's `out`, and of a plan
            whose gradients are read once.
        out: (T, N), where the output goes; made where None.
        dgrad_out: (T, K), where the gradient of the input goes; made where None. Not with a front.
        saves_original: whether backward quantizes the input once more, instead of forward saving it quantized.
        later: keeps the product that gives the gradient of the weights, instead of backward; None for at once.
        cached: the weights quantized beforehand, in both directions; None where that is done now.
        is_first: whether this is the first of several calls before a step of the optimizer; None for the only one.
        skip: a flag on the device: where it is set, weights are not quantized but taken as they were; None for neither.
    """

    table: Tensor
    plan: Plan
    front: GroupFront | None = None
    epilogue: GroupEpilogue | None = None
    hands_to: GroupFront | None = None
    out: Tensor | None = None
    dgrad_out: Tensor | None = None
    saves_original: bool = False
    later: LeftGradients | None = None
    cached: GroupedStorage | None = None
    is_first: bool | None = None
    skip: Tensor | None = None

    @property
    def adds(self) -> bool:
        """Whether what is in a `main_grad` counts; else it is overwritten."""
        return self.is_first is not True

    def saves_itself(self, x: Tensor) -> bool:
        """Whether backward is to have the input as it is: where that is asked for, or all there is."""
        quantizer = self.plan.input
        is_plain = isinstance(quantizer, IdentityQuantizer) and quantizer.dtype in (None, x.dtype)
        return self.saves_original or is_plain or isinstance(x, QuantizedTensor)

    def source(self, x: Tensor, beside: Sequence[Tensor]) -> Tensor | Source:
        """What is multiplied."""
        return x if self.front is None else self.front.source(x, *beside)

    def made_of(self, rows: Tensor, behind: Sequence[Tensor]) -> Tensor:
        """The output, of its rows."""
        return rows if self.epilogue is None else self.epilogue.apply(rows, *behind)

    def of_rows(self, grad: Tensor, behind: Sequence[Tensor]) -> Tensor | Source:
        """The gradient of the rows of the output, of that of what an epilogue made of them."""
        return grad if self.epilogue is None else self.epilogue.gradient(grad, *behind)

    @property
    def kind(self) -> Hashable:
        """What is to be known of this besides its tensors."""
        cached = None if self.cached is None else (self.cached.format, self.cached.group, tuple(self.cached.buffers))
        around = [None if each is None else each.name for each in (self.front, self.epilogue, self.hands_to)]
        given = self.out is None, self.dgrad_out is None, self.saves_original, self.later is None, self.adds
        return *around, *given, cached

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that are read or written."""
        made = [tensor for tensor in (self.out, self.dgrad_out) if tensor is not None]
        cached = () if self.cached is None else self.cached.buffers.values()
        return (self.table, *made, *cached, *self.plan.tensors)


class Around(TypedDict, total=False):
    """Further tensors of `grouped_linear`, as keywords.

    biases: none, one tensor (G, N), or (N,) for each group.
    beside: what the front reads beside the input.
    behind: what an epilogue reads beside the rows of the product, without a gradient; or the front that they are handed
        to, which finds gradients.
    values: what stands for the values of the front, where that was handed over: the gradient of these goes there.
    """

    biases: Sequence[Tensor]
    beside: Sequence[Tensor]
    behind: Sequence[Tensor]
    values: Tensor | None


def grouped_linear(
    x: Tensor, weights: Sequence[Tensor], *, given: Given, **around: Unpack[Around]
) -> Tensor | tuple[Tensor, Tensor]:
    """The rows of every group of `x` (T, K) times its matrix (N, K) transposed, plus its bias: (T, N), or what an
    epilogue makes of them. With `given.hands_to` these rows, and what stands for the values of that front.

    Rows behind the last group are zeros, in the output and in the gradient of `x`; where the caller owns the memory,
    they are left as they are.

    Args:
        x: plain; or a QuantizedTensor whose rowwise direction is multiplied. Of what that stands for, the columnwise
            direction is quantized in groups where the gradient of a weight is wanted. With a front, its input.
        weights: one tensor (G, N, K), or one (N, K) for each group; plain or quantized, all in one format. Gradients
            are plain, in the nominal dtype; those of several are views of one tensor.
    """
    biases, beside, behind = (around.get(each, ()) for each in ("biases", "beside", "behind"))
    x = x if given.front is None else x.contiguous()
    saves_input = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    counts = Counts(len(weights), len(biases), len(beside), saves_input)
    return applied(_GroupedLinear, x, around.get("values"), given, counts, *weights, *biases, *beside, *behind)


def reads_weights(x: Tensor, **around: Unpack[Around]) -> bool:
    """Whether backward of a call with these may read its weights."""
    read = x, around.get("values"), *around.get("beside", ())
    return any(tensor is not None and tensor.requires_grad for tensor in read)


def differentiable(out: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Of what `grouped_linear` returns, what has a gradient."""
    return out if isinstance(out, Tensor) else out[1]


class Counts(NamedTuple):
    """How many tensors of a call are what, and whether backward needs the input."""

    weights: int
    biases: int
    beside: int
    saves_input: bool


def split(tensors: Sequence[Any], counts: Sequence[int]) -> tuple[Sequence[Any], ...]:
    """Weights, biases, what is beside and what behind, of so many of these as `counts` begins with."""
    first, second, third = counts[0], counts[0] + counts[1], counts[0] + counts[1] + counts[2]
    return tensors[:first], tensors[first:second], tensors[second:third], tensors[third:]


class Backward(NamedTuple):
    """What backward is about: `wants` gradients of the input or what is beside it, of weights, and of biases.

    Attributes:
        grad: that of the output, or of what is made of it; None once it is quantized.
        inputs: the input columnwise, as `GroupedRows.as_matrix`; None where it is quantized once more.
        x: the input itself, where that or a front needs it.
        beside: what the front reads beside it.
        weights: as they came in; none where they are not read.
        main_grad: fp32 (G, N, K), to which the gradient of the weights is added; None to return it.
        shape: (G, N, K).
        dtypes: of input, weights and biases.
        rows: of the output, where the front that they were handed to needs them.
        behind: what is read beside them, or by an epilogue.
        read: what became of `grad`, where it was read beforehand.
    """

    grad: Tensor | None
    inputs: QuantizedTensor | None
    x: Tensor | None
    beside: Sequence[Tensor]
    weights: Sequence[Tensor]
    main_grad: Tensor | None
    wants: tuple[bool, bool, bool]
    shape: tuple[int, int, int]
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None]
    rows: Tensor | None = None
    behind: Sequence[Tensor] = ()
    read: Gradient | None = None


class _GroupedLinear(torch.autograd.Function):
    """See [Note: What a linear map saves]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor | None, given: Given, counts: Counts, *tensors: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        weights, biases, beside, behind = split(tensors, counts)
        operands = as_one(weights), as_one(biases), beside, behind
        (out, *buffers), kind = taped_forward(x, operands, counts, given=given)
        wants_input = _wants_input(ctx.needs_input_grad, counts)
        ctx.given = given._replace(out=None) if given.out is not None else given
        ctx.counts, ctx.shape = counts, shape_of(weights)
        ctx.dtypes = x.dtype, weights[0].dtype, biases[0].dtype if biases else None
        ctx.is_one = weights[0].dim() == 3, bool(biases) and biases[0].dim() == 2
        ctx.parameters = weights if counts.saves_input and (given.plan.fuses_wgrad or given.later) else ()
        ctx.num_values = int(values is not None)
        inputs = None if kind is None else QuantizedTensor(kind.storage(buffers))
        finds_gradients = given.front is not None and given.front.gradient is not None
        keeps_x = (counts.saves_input and kind is None) or (finds_gradients and wants_input)
        held = tuple(weights) if wants_input and given.cached is None else ()
        around = *behind, *(beside if keeps_x else ())
        ctx.num_held, ctx.num_behind = len(held), len(behind)
        handed = given.hands_to
        rows = None if handed is None else out
        save(ctx, given.table, inputs, x if keeps_x else None, rows, *held, *around, inputs=1)
        if handed is not None:
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(out)
            return out, out[:, : handed.source(out, *behind).shape[1]]
        return out.detach() if out is given.out else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        table, inputs, x, rows, *rest = saved(ctx)
        grad, wants, given = grads[-1], ctx.needs_input_grad, ctx.given
        if grad is None:  # nothing came of the values
            return (None,) * len(wants)
        weights, around = rest[: ctx.num_held], rest[ctx.num_held :]
        behind, beside = around[: ctx.num_behind], around[ctx.num_behind :]
        if table is not given.table:  # hooks hand out another one
            given = given._replace(table=table)
        of_weights, of_biases, of_beside, of_behind = split(wants[_CONSTANTS:], ctx.counts)
        wants_input = _wants_input(wants, ctx.counts)
        if given.plan.fuses_wgrad or given.later is not None or given.hands_to is not None:
            # What is written beside autograd has to be asked for; and what is behind may be wanted alone.
            nodes = [node for node, _ in ctx.next_functions]
            first = 1 + ctx.num_values
            of_weights = [w and is_executed(node) for w, node in zip(of_weights, nodes[first:], strict=False)]
            if given.hands_to is not None and not any(of_beside):
                wants_input = wants_input and is_executed(nodes[first - 1])
        if given.dgrad_out is not None and wants[0]:
            _check_apart(given.dgrad_out, given.plan, grad, x if any(of_weights) else None)
        wanted = (wants_input, any(of_weights), any(of_biases))
        of = Backward(grad.contiguous(), inputs, x, beside, as_one(weights), None, wanted, ctx.shape, ctx.dtypes)
        of, of_rest = of._replace(rows=rows, behind=behind), ()
        if given.hands_to is not None:
            of, of_rest = read_handed(of, given, any(of_behind))
            let_go(ctx)
            del rows
        of_x, of_weight, of_bias = _gradients(of, given, ctx.parameters, of_weights)
        if given.plan.moves is not None and any(wanted):
            given.plan.moves.move_when_backward_ends()
        each = *_each(of_weight, of_weights, ctx.is_one[0]), *_each(of_bias, of_biases, ctx.is_one[1])
        first, *each_beside = where_wanted(of_x, ((wants[0] or wants[1]) and wants_input, *of_beside))
        of_input = (None, first) if ctx.num_values else (first, None)
        return *of_input, None, None, *each, *each_beside, *where_wanted(of_rest, of_behind)


def _wants_input(wants: Sequence[bool], counts: Counts) -> bool:
    """Whether the gradient of the input is wanted, by whatever comes of it."""
    return wants[0] or wants[1] or any(split(wants[_CONSTANTS:], counts)[2])


def where_wanted(gradients: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """One for each that might want one; they may be fewer, where no other wants any."""
    rest = wanted[len(gradients) :]
    assert not any(rest), "a gradient is wanted that nobody finds"
    found = [each if wants else None for each, wants in zip(gradients, wanted, strict=False)]
    return [*found, *(None for _ in rest)]


def _check_apart(dgrad_out: Tensor, plan: Plan, grad: Tensor, x: Tensor | None) -> None:
    """Before `dgrad_out` is written. `x`: the input, where it is read behind that."""
    read = {"the input": x}
    if isinstance(plan.grad_output, IdentityQuantizer):  # else it is quantized by then
        read["the gradient of the output"] = grad
    for name, tensor in read.items():
        if tensor is not None and overlap(dgrad_out, tensor):
            raise ValueError(
                f"dgrad_out: got memory of {name}, which is read when dgrad_out has been written; pass another buffer"
            )


def _each(gradient: Tensor | None, wanted: Sequence[bool], is_one: bool) -> Sequence[Tensor | None]:
    """The gradient of one tensor of all groups, or its parts for one tensor of each."""
    if gradient is None:
        return (None,) * len(wanted)
    if is_one:
        return (gradient,)
    return [part if wants else None for part, wants in zip(gradient.unbind(), wanted, strict=True)]


def taped_forward(
    x: Tensor, tensors: _Operands, counts: Counts, *, given: Given
) -> tuple[tuple[Tensor, ...], StorageKind | None]:
    """(output, buffers of the input that backward needs), what these are; no autograd."""
    weights, *others = tensors
    read = weights if given.cached is None else ()
    parts, kinds = taken_apart(x, *read, *chain.from_iterable(others))
    key = ("forward", kinds, counts, given.kind)
    return given.plan.tapes.run(key, (*parts, *given.tensors), lambda: _forward(x, tensors, counts, given))


def _forward(
    x: Tensor, tensors: _Operands, counts: Counts, given: Given
) -> tuple[tuple[Tensor, ...], StorageKind | None]:
    weights, biases, beside, behind = tensors
    plan, saves = given.plan, counts.saves_input and not given.saves_itself(x)
    rows, left = _quantized_input(x, beside, given, (ROWWISE, COLUMNWISE) if saves else (ROWWISE,))
    stack = given.cached or stacked(weights, plan.weight, ROWWISE)
    bias = together(biases, dims=2) if biases else None
    out = given.out
    if out is None:
        out = _blank((left.region.shape[0], weights[0].shape[-2]), x.dtype, given.table)
    multiply_rows(left, members_of(stack, ROWWISE, left, out=out), Result(given.table, bias, False, out))
    out = given.made_of(out, behind)
    if rows is None or not saves:  # none where the input came quantized, which is saved itself
        return (out,), None
    part = rows.as_matrix(COLUMNWISE)
    return (out, *part.buffers.values()), StorageKind.of(part)


def _quantized_input(
    x: Tensor, beside: Sequence[Tensor], given: Given, directions: tuple[Direction, ...]
) -> tuple[GroupedRows | None, Rows]:
    """The input quantized in groups, None where it came quantized; and as the product reads it."""
    if isinstance(x, QuantizedTensor):
        if ROWWISE not in x.storage.directions:
            raise x.storage.absent(ROWWISE)
        return None, operand(x.storage, ROWWISE)
    rows = given.plan.input.encode_groups(given.source(x, beside), given.table, *directions)
    return rows, operand(rows.as_matrix(ROWWISE), ROWWISE)


def _blank(shape: tuple[int, int], dtype: torch.dtype, table: Tensor) -> Tensor:
    """Where products of rows go, whose rows behind the last group are zeros."""
    out = torch.empty(shape, dtype=dtype, device=table.device)
    clear_rest(out, table)
    return out


def _gradients(
    of: Backward, given: Given, parameters: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None]:
    """Gradients of the input and what is beside it, of the weights, of the biases, those that are wanted.

    Args:
        parameters: the weights, where something is written into them; `wanted` says of which.
    """
    main = None
    if of.wants[1] and given.plan.fuses_wgrad and given.later is None:
        main = MainGrads.of(parameters, wanted, of.shape, adds=given.adds)
        of = of._replace(main_grad=main.whole)
    found, (num_inputs, saved) = taped_backward(of, given)
    of_x, found = found[:num_inputs], found[num_inputs:]
    of_bias, found = (found[0], found[1:]) if of.wants[2] else (None, found)
    if saved is not None and given.later is not None:
        rest = of._replace(grad=None, weights=(), read=None)
        reads = (*taken_apart(of.x, *of.beside)[0], *found, given.table)
        alone = given._replace(later=None)  # what is left does not hold what it is left in
        given.later.leave(lambda: _finish(rest, saved.storage(found), alone, (parameters, wanted)), reads)
        return of_x, None, of_bias
    if main is not None:
        main.finish()
    return of_x, found[0] if found else None, of_bias


def _finish(
    of: Backward, grads: QuantizedStorage, given: Given, weights: tuple[Sequence[Tensor], Sequence[bool]]
) -> None:
    """The gradient of the weights, computed after backward, is where backward would have put it.

    Args:
        weights: these, and whose gradient is wanted.
    """
    parameters, wanted = weights
    main = MainGrads.of(parameters, wanted, of.shape, adds=given.adds) if given.plan.fuses_wgrad else None
    of = of._replace(main_grad=None if main is None else main.whole)
    parts, kinds = taken_apart(of.inputs, of.x, *of.beside, of.main_grad)
    held = (*parts, *grads.buffers.values(), *given.tensors)
    key = ("sums", grads.format, kinds, of.shape, of.dtypes, given.kind)
    (found,) = given.plan.tapes.run(key, held, lambda: ((_weight_gradient(of, grads, given),), None))[0]
    if main is not None:
        return main.finish()
    for parameter, gradient in zip(parameters, _each(found, wanted, parameters[0].dim() == 3), strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def read_handed(of: Backward, given: Given, wants_behind: bool) -> tuple[Backward, tuple[Tensor, ...]]:
    """What is left to do when the gradient of handed rows is quantized, and the gradients of what is behind them.

    It is a step of its own, behind which the rows are not needed.
    """
    parts, kinds = taken_apart(of.grad, of.rows, *of.behind)
    key = ("handed", kinds, of.wants, wants_behind, given.kind)
    tensors, kind = given.plan.tapes.run(key, (*parts, *given.tensors), lambda: _handed(of, given, wants_behind))
    read = put_together(tensors, kind, given.table)
    return of._replace(grad=None, rows=None, behind=(), read=read), tensors[len(read.tensors) :]


def _handed(of: Backward, given: Given, wants_behind: bool) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    handed = given.hands_to
    assert handed is not None and handed.gradient is not None
    source = handed.gradient(of.grad, of.rows, *of.behind)
    source = source if wants_behind else unsummed(source)
    read = _read(source if any(of.wants[:2]) else values(source), of.wants, given)
    of_behind = handed.of_beside(source, *of.behind) if wants_behind else ()
    for gradient in of_behind:
        clear_rest(gradient, given.table)
    return (*read.tensors, *of_behind), read.kind


def _read(grad: Tensor | Source, wants: tuple[bool, bool, bool], given: Given) -> Gradient:
    quantizer, directions = given.plan.grad_output, directions_of(wants)
    return read_gradient(grad, given.table, quantizer=quantizer, directions=directions, sums=wants[2])


class Found(NamedTuple):
    """What backward has found: gradients of so many inputs, of biases, and of weights.

    Instead of the last, where they are computed later, buffers of the gradient of the output, and what is `saved` so.
    """

    inputs: int
    saved: StorageKind | None


def taped_backward(of: Backward, given: Given) -> tuple[tuple[Tensor, ...], Found]:
    """Gradients, and what these are; no autograd."""
    read, kind = ((), None) if of.read is None else (of.read.tensors, of.read.kind)
    parts, kinds = taken_apart(of.grad, *read, of.inputs, of.x, *of.beside, *of.behind, *of.weights, of.main_grad)
    key = ("backward", kinds, kind, len(of.beside), of.wants, of.shape, of.dtypes, given.kind)
    return given.plan.tapes.run(key, (*parts, *given.tensors), lambda: _backward(of, given))


def _backward(of: Backward, given: Given) -> tuple[tuple[Tensor, ...], Found]:
    wants_input, wants_weight, _ = of.wants
    read = of.read
    if read is None:
        assert of.grad is not None, "there is a gradient, or what became of it"
        read = _read(given.of_rows(of.grad, of.behind), of.wants, given)
    gradients: list[Tensor] = []
    if wants_input:
        gradients += _input_gradients(of, read.along(ROWWISE), given)
    num_inputs = len(gradients)
    if read.sums is not None:
        gradients.append(read.sums.to(of.dtypes[2]))
    if not wants_weight:
        return tuple(gradients), Found(num_inputs, None)
    if given.later is not None:
        part = read.along(COLUMNWISE)
        return (*gradients, *part.buffers.values()), Found(num_inputs, StorageKind.of(part))
    found = _weight_gradient(of, read.along(COLUMNWISE), given)
    return (*gradients, *(() if of.main_grad is not None else (found,))), Found(num_inputs, None)


def _input_gradients(of: Backward, grads: QuantizedStorage, given: Given) -> Sequence[Tensor]:
    stack = given.cached or stacked(of.weights, given.plan.weight, COLUMNWISE)
    shape = grads.region.shape[0], of.shape[2]
    out = _blank(shape, of.dtypes[0], given.table) if given.dgrad_out is None else given.dgrad_out
    left = operand(grads, ROWWISE)
    multiply_rows(left, members_of(stack, COLUMNWISE, left, out=out), Result(given.table, None, False, out))
    if given.front is None or given.front.gradient is None:
        return (out,)
    assert of.x is not None, "saved where a front finds gradients"
    return given.front.gradients(out, of.x, *of.beside, table=given.table)


def _weight_gradient(of: Backward, grads: QuantizedStorage, given: Given) -> Tensor:
    """(G, N, K), returned or added to `main_grad`."""
    inputs = None if of.inputs is None else of.inputs.storage
    if inputs is None:
        assert of.x is not None, "the input is saved, quantized or as it is"
        x = of.x.dequantize() if isinstance(of.x, QuantizedTensor) else given.source(of.x, of.beside)
        inputs = given.plan.input.encode_groups(x, given.table, COLUMNWISE).as_matrix(COLUMNWISE)
    out, adds = of.main_grad, of.main_grad is not None and given.adds
    if out is None:
        out = torch.empty(of.shape, dtype=of.dtypes[1], device=given.table.device)
    return multiply_sums(operand(grads, COLUMNWISE), operand(inputs, COLUMNWISE), SumsResult(given.table, adds, out))
