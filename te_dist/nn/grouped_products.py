"""The matrix multiplications of linear maps of rows in groups, each group by a matrix of its own.

What is saved is what [Note: What a linear map saves] says: the input columnwise, quantized once, as one tensor; the
weight as it came in. Where the groups lie is read from a table on the device, see [Note: What products in groups wait
for], which is saved beside. The gradient of all matrices is one tensor, (G, N, K).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_dist import ops
from te_dist._torch_private import applied, is_executed
from te_dist.codecs.grouped_gemm import Result, Rows, SumsResult, multiply_rows, multiply_sums
from te_dist.formats import Direction
from te_dist.grouped import GroupedStorage
from te_dist.kernels.tape import Tapes
from te_dist.nn.buffers import overlap
from te_dist.nn.grouped_weights import MainGrads, as_one, members_of, shape_of, stacked, together
from te_dist.nn.left_gradients import LeftGradients
from te_dist.nn.once import once_differentiable
from te_dist.nn.products import Plan, Saved, taken_apart
from te_dist.nn.saved import save, saved
from te_dist.ops.evaluate import values
from te_dist.ops.panel_sums import column_sums
from te_dist.ops.source import Source, SwiGlu, SwiGluGradient, row_sums_shape
from te_dist.quantizers import IdentityQuantizer
from te_dist.tensor import GroupedRows, QuantizedStorage, QuantizedTensor

ROWWISE, COLUMNWISE = BOTH = Direction.ROWWISE, Direction.COLUMNWISE
_Operands = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]  # weights, biases, what is beside the input
_TABLE_ROWS = 4
_ONES = 8  # columns of ones that plain values are summed by: a row of 16 bytes
_tables = Tapes(max_tapes=1024)  # of all group tables


class GroupFront(NamedTuple):
    """What is computed of an input on its way into the quantizer of groups.

    Attributes:
        name: two fronts of one name are one.
        source: of the input and the tensors beside it, of as many rows as there are in groups.
        gradients: by the input and each tensor beside it, given these, the gradient of the source's values, and the
            group table: of rows in groups, those behind the last group are zeros whatever these tensors hold there.
    """

    name: Hashable
    source: Callable[..., Source]
    gradients: Callable[..., tuple[Tensor, ...]]


class GroupEpilogue(NamedTuple):
    """What is made of the rows of the output, before anybody sees them. It is linear in them.

    Attributes:
        name: two of one name are one.
        apply: of the rows and the tensors behind the product.
        gradient: of the gradient of what was made and the same tensors, that of the rows, as a source of as many.
    """

    name: Hashable
    apply: Callable[..., Tensor]
    gradient: Callable[..., Source]


def _swiglu_gradients(x: Tensor, product: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    gradient = values(SwiGluGradient(x, product))
    ops.clear_rest(gradient, table=table)  # a product with what `x` holds there, which may be NaN
    return (gradient,)


def _weighted_swiglu_gradients(x: Tensor, probability: Tensor, product: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    row_sums = torch.empty(row_sums_shape(product), dtype=torch.float32, device=product.device)
    gradient = values(SwiGluGradient(x, product, probability, row_sums))
    of_probability = column_sums(row_sums)
    for cleared in (gradient, of_probability.view(-1, 1)):
        ops.clear_rest(cleared, table=table)
    return gradient, of_probability


SWIGLU = GroupFront("swiglu", SwiGlu, _swiglu_gradients)
WEIGHTED_SWIGLU = GroupFront("weighted_swiglu", SwiGlu, _weighted_swiglu_gradients)  # beside: f32 (T,), see `SwiGlu`


class Given(NamedTuple):
    """What a call of `grouped_linear` is given besides differentiable tensors.

    Attributes:
        table: int32 (4, G + 1), see `GroupTable`; of as many rows as the input has.
        plan: how operands are quantized.
        front: what of the input is multiplied; None for itself.
        epilogue: what becomes of the rows of the output; None where they are it. Not with a caller's `out`.
        behind: what the epilogue reads, none of which has a gradient.
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
    behind: tuple[Tensor, ...] = ()
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

    def made_of(self, rows: Tensor) -> Tensor:
        """The output, of its rows."""
        return rows if self.epilogue is None else self.epilogue.apply(rows, *self.behind)

    def of_rows(self, grad: Tensor) -> Tensor | Source:
        """The gradient of the rows of the output, of its own."""
        return grad if self.epilogue is None else self.epilogue.gradient(grad, *self.behind)

    @property
    def kind(self) -> Hashable:
        """What is to be known of this besides its tensors."""
        cached = None if self.cached is None else (self.cached.format, self.cached.group, tuple(self.cached.buffers))
        around = [None if each is None else each.name for each in (self.front, self.epilogue)]
        given = self.out is None, self.dgrad_out is None, self.saves_original, self.later is None, self.adds
        return *around, *given, cached

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that are read or written."""
        made = [tensor for tensor in (self.out, self.dgrad_out) if tensor is not None]
        cached = () if self.cached is None else self.cached.buffers.values()
        return (self.table, *made, *cached, *self.behind, *self.plan.tensors)


class GroupTable(NamedTuple):
    """Where groups begin in a matrix, and how many rows that has: kernels read as far as a table says.

    Attributes:
        tensor: int32 (4, G + 1), as `ops.group_table` writes it.
        rows: of the matrix.
    """

    tensor: Tensor
    rows: int


def group_table(m_splits: Tensor, rows: int) -> GroupTable:
    """Where groups of these sizes, int (G,), begin in a matrix of `rows`; on their device, which is not waited for."""
    if torch.compiler.is_compiling():
        return GroupTable(_table_of(m_splits, rows), rows)
    (table,), _ = _tables.run(rows, (m_splits,), lambda: ((_table_of(m_splits, rows),), None))
    return GroupTable(table, rows)


def _table_of(m_splits: Tensor, rows: int) -> Tensor:
    table = torch.empty((_TABLE_ROWS, m_splits.shape[0] + 1), dtype=torch.int32, device=m_splits.device)
    ops.group_table(m_splits, rows=rows, out=table, are_sizes=True)
    return table


def grouped_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    *,
    given: Given,
    biases: Sequence[Tensor] = (),
    beside: Sequence[Tensor] = (),
) -> Tensor:
    """The rows of every group of `x` (T, K) times its matrix (N, K) transposed, plus its bias: (T, N), or what an
    epilogue makes of them.

    Rows behind the last group are zeros, in the output and in the gradient of `x`; where the caller owns the memory,
    they are left as they are.

    Args:
        x: plain; or a QuantizedTensor whose rowwise direction is multiplied. Of what that stands for, the columnwise
            direction is quantized in groups where the gradient of a weight is wanted. With a front, its input.
        weights: one tensor (G, N, K), or one (N, K) for each group; plain or quantized, all in one format. Gradients
            are plain, in the nominal dtype; those of several are views of one tensor.
        biases: none, one tensor (G, N), or (N,) for each group.
        beside: what the front reads beside `x`.
    """
    x = x if given.front is None else x.contiguous()
    saves_input = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    counts = Counts(len(weights), len(biases), saves_input)
    return applied(_GroupedLinear, x, given, counts, *weights, *biases, *beside)


class Counts(NamedTuple):
    """How many tensors of a call are what, and whether backward needs the input."""

    weights: int
    biases: int
    saves_input: bool

    def split(self, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """(weights, biases, beside)."""
        second = self.weights + self.biases
        return tensors[: self.weights], tensors[self.weights : second], tensors[second:]


class Backward(NamedTuple):
    """What backward is about: `wants` gradients of the input or what is beside it, of weights, and of biases.

    Attributes:
        grad: that of the output, (T, N) without an epilogue; None once it is quantized.
        inputs: the input columnwise, as `GroupedRows.as_matrix`; None where it is quantized once more.
        x: the input itself, where that or a front needs it.
        beside: what the front reads beside it.
        weights: as they came in; none where they are not read.
        main_grad: fp32 (G, N, K), to which the gradient of the weights is added; None to return it.
        shape: (G, N, K).
        dtypes: of input, weights and biases.
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


class _GroupedLinear(torch.autograd.Function):
    """See [Note: What a linear map saves]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: Given, counts: Counts, *tensors: Tensor) -> Tensor:
        weights, biases, beside = counts.split(tensors)
        (out, *buffers), kind = taped_forward(x, (as_one(weights), as_one(biases), beside), counts, given=given)
        wants_input = ctx.needs_input_grad[0] or any(counts.split(ctx.needs_input_grad[3:])[2])
        ctx.given = given._replace(out=None, behind=()) if given.out is not None or given.behind else given
        ctx.counts, ctx.shape = counts, shape_of(weights)
        ctx.dtypes = x.dtype, weights[0].dtype, biases[0].dtype if biases else None
        ctx.is_one = weights[0].dim() == 3, bool(biases) and biases[0].dim() == 2
        ctx.parameters = weights if counts.saves_input and (given.plan.fuses_wgrad or given.later) else ()
        inputs = None if kind is None else QuantizedTensor(kind.storage(buffers))
        keeps_x = (counts.saves_input and kind is None) or (given.front is not None and wants_input)
        held = tuple(weights) if wants_input and given.cached is None else ()
        ctx.num_held, ctx.num_behind = len(held), len(given.behind)
        around = *given.behind, *(beside if keeps_x else ())
        save(ctx, given.table, inputs, x if keeps_x else None, *held, *around, inputs=1)
        return out.detach() if out is given.out else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        table, inputs, x, *rest = saved(ctx)
        wants, given = ctx.needs_input_grad, ctx.given
        weights, around = rest[: ctx.num_held], rest[ctx.num_held :]
        behind, beside = tuple(around[: ctx.num_behind]), around[ctx.num_behind :]
        if behind or table is not given.table:  # hooks hand out another one
            given = given._replace(table=table, behind=behind)
        of_weights, of_biases, of_beside = ctx.counts.split(wants[3:])
        if given.plan.fuses_wgrad or given.later is not None:  # what is written beside autograd has to be asked for
            nodes = ctx.next_functions[1 : 1 + len(of_weights)]
            of_weights = [w and is_executed(node) for w, (node, _) in zip(of_weights, nodes, strict=True)]
        if given.dgrad_out is not None and wants[0]:
            _check_apart(given, grad, x if any(of_weights) else None)
        wanted = (wants[0] or any(of_beside), any(of_weights), any(of_biases))
        of = Backward(grad.contiguous(), inputs, x, beside, as_one(weights), None, wanted, ctx.shape, ctx.dtypes)
        of_x, of_weight, of_bias = _gradients(of, given, ctx.parameters, of_weights)
        if given.plan.moves is not None:
            given.plan.moves.move_when_backward_ends()
        of_x = of_x or (None,) * (1 + len(of_beside))
        each = *_each(of_weight, of_weights, ctx.is_one[0]), *_each(of_bias, of_biases, ctx.is_one[1])
        of_beside = (each if wants else None for each, wants in zip(of_x[1:], of_beside, strict=True))
        return of_x[0] if wants[0] else None, None, None, *each, *of_beside


def _check_apart(given: Given, grad: Tensor, x: Tensor | None) -> None:
    """Before `dgrad_out` is written. `x`: the input, where it is read behind that."""
    read = {"the input": x}
    if isinstance(given.plan.grad_output, IdentityQuantizer):  # else it is quantized by then
        read["the gradient of the output"] = grad
    for name, tensor in read.items():
        if tensor is not None and overlap(given.dgrad_out, tensor):
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
) -> tuple[tuple[Tensor, ...], Saved | None]:
    """(output, buffers of the input that backward needs), what these are; no autograd."""
    weights, biases, beside = tensors
    read = weights if given.cached is None else ()
    parts, kinds = taken_apart(x, *read, *biases, *beside)
    key = ("forward", kinds, counts, given.kind)
    return given.plan.tapes.run(key, (*parts, *given.tensors), lambda: _forward(x, tensors, counts, given))


def _forward(x: Tensor, tensors: _Operands, counts: Counts, given: Given) -> tuple[tuple[Tensor, ...], Saved | None]:
    weights, biases, beside = tensors
    plan, saves = given.plan, counts.saves_input and not given.saves_itself(x)
    rows, operand = _quantized_input(x, beside, given, (ROWWISE, COLUMNWISE) if saves else (ROWWISE,))
    stack = given.cached or stacked(weights, plan.weight, ROWWISE)
    bias = together(biases, dims=2) if biases else None
    out = given.out
    if out is None:
        out = _blank((operand.region.shape[0], weights[0].shape[-2]), x.dtype, given.table)
    multiply_rows(operand, members_of(stack, ROWWISE, operand, out=out), Result(given.table, bias, False, out))
    out = given.made_of(out)
    if not saves:
        return (out,), None
    buffers, saved = saved_part(rows)
    return (out, *buffers), saved


def saved_part(rows: GroupedRows) -> tuple[tuple[Tensor, ...], Saved]:
    """What backward needs of the input: its buffers, and what these are."""
    part = rows.as_matrix(COLUMNWISE)
    return tuple(part.buffers.values()), Saved(part.format, tuple(part.buffers), part.region, part.dtype)


def _quantized_input(
    x: Tensor, beside: Sequence[Tensor], given: Given, directions: tuple[Direction, ...]
) -> tuple[GroupedRows | None, Rows]:
    """The input quantized in groups, None where it came quantized; and as the product reads it."""
    if isinstance(x, QuantizedTensor):
        if ROWWISE not in x.storage.directions:
            raise x.storage.absent(ROWWISE)
        return None, _operand(x.storage, ROWWISE)
    rows = given.plan.input.encode_groups(given.source(x, beside), given.table, *directions)
    return rows, _operand(rows.as_matrix(ROWWISE), ROWWISE)


def _operand(storage: QuantizedStorage, direction: Direction) -> Rows:
    sums_over = 1 if direction is ROWWISE else 0
    return Rows(storage.format[direction], storage.stored(direction), storage.region, sums_over)


def _blank(shape: tuple[int, int], dtype: torch.dtype, table: Tensor) -> Tensor:
    """Where products of rows go, whose rows behind the last group are zeros."""
    out = torch.empty(shape, dtype=dtype, device=table.device)
    ops.clear_rest(out, table=table)
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
    found, saved = taped_backward(of, given)
    of_x, found = found[: _num_inputs(of)], found[_num_inputs(of) :]
    of_bias, found = (found[0], found[1:]) if of.wants[2] else (None, found)
    if saved is not None:
        rest = of._replace(grad=None, weights=())
        reads = (*taken_apart(of.x, *of.beside)[0], *found, given.table)
        alone = given._replace(later=None)  # what is left does not hold what it is left in
        given.later.leave(lambda: _finish(rest, saved.storage(found), alone, (parameters, wanted)), reads)
        return of_x, None, of_bias
    if main is not None:
        main.finish()
    return of_x, found[0] if found else None, of_bias


def _num_inputs(of: Backward) -> int:
    return 1 + len(of.beside) if of.wants[0] else 0


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


def taped_backward(of: Backward, given: Given) -> tuple[tuple[Tensor, ...], Saved | None]:
    """(gradients of inputs, of biases, of weights), None; no autograd.

    Instead of the last, where they are computed later, buffers of the gradient of the output, and what these are.
    """
    parts, kinds = taken_apart(of.grad, of.inputs, of.x, *of.beside, *of.weights, of.main_grad)
    key = ("backward", kinds, of.wants, of.shape, of.dtypes, given.kind)
    return given.plan.tapes.run(key, (*parts, *given.tensors), lambda: _backward(of, given))


def _backward(of: Backward, given: Given) -> tuple[tuple[Tensor, ...], Saved | None]:
    wants_input, wants_weight, wants_bias = of.wants
    directions = (ROWWISE,) * wants_input + (COLUMNWISE,) * wants_weight
    grads, sums = _quantized_grad(given.of_rows(of.grad), given, directions, wants_bias)
    gradients: list[Tensor] = []
    if wants_input:
        gradients += _input_gradients(of, grads.as_matrix(ROWWISE), given)
    if wants_bias:
        gradients.append(sums.to(of.dtypes[2]))
    if not wants_weight:
        return tuple(gradients), None
    if given.later is not None:
        buffers, saved = saved_part(grads)
        return (*gradients, *buffers), saved
    found = _weight_gradient(of, grads.as_matrix(COLUMNWISE), given)
    return (*gradients, *(() if of.main_grad is not None else (found,))), None


def _input_gradients(of: Backward, grads: QuantizedStorage, given: Given) -> Sequence[Tensor]:
    stack = given.cached or stacked(of.weights, given.plan.weight, COLUMNWISE)
    shape = grads.region.shape[0], of.shape[2]
    out = _blank(shape, of.dtypes[0], given.table) if given.dgrad_out is None else given.dgrad_out
    operand = _operand(grads, ROWWISE)
    multiply_rows(operand, members_of(stack, COLUMNWISE, operand, out=out), Result(given.table, None, False, out))
    return (out,) if given.front is None else given.front.gradients(of.x, *of.beside, out, given.table)


def _weight_gradient(of: Backward, grads: QuantizedStorage, given: Given) -> Tensor:
    """(G, N, K), returned or added to `main_grad`."""
    inputs = None if of.inputs is None else of.inputs.storage
    if inputs is None:
        x = of.x.dequantize() if isinstance(of.x, QuantizedTensor) else given.source(of.x, of.beside)
        inputs = given.plan.input.encode_groups(x, given.table, COLUMNWISE).as_matrix(COLUMNWISE)
    out, adds = of.main_grad, of.main_grad is not None and given.adds
    if out is None:
        out = torch.empty(of.shape, dtype=of.dtypes[1], device=given.table.device)
    return multiply_sums(_operand(grads, COLUMNWISE), _operand(inputs, COLUMNWISE), SumsResult(given.table, adds, out))


def _quantized_grad(
    grad: Tensor | Source, given: Given, directions: tuple[Direction, ...], wants_sums: bool
) -> tuple[GroupedRows | None, Tensor | None]:
    """`grad` along `directions`, and the sums (G, N) of its columns, in one pass over it where a quantizer reads it."""
    quantizer = given.plan.grad_output
    if wants_sums and directions and quantizer.declare(grad.dtype)[directions[0]].codec.pads_groups:
        return quantizer.encode_groups_and_sum(grad, given.table, *directions)
    grads = quantizer.encode_groups(grad, given.table, *directions) if directions else None
    return grads, _plain_sums(grad, given.table) if wants_sums else None


def _plain_sums(x: Tensor | Source, table: Tensor) -> Tensor:
    """The sums of the columns of every group, f32 (G, N): its product with ones."""
    ones = torch.ones((x.shape[0], _ONES), dtype=x.dtype, device=x.device)
    out = torch.empty((table.shape[1] - 1, _ONES, x.shape[1]), dtype=torch.float32, device=x.device)
    operands = (
        _operand(IdentityQuantizer().encode_groups(side, table, COLUMNWISE).as_matrix(COLUMNWISE), COLUMNWISE)
        for side in (ones, x)
    )
    return multiply_sums(*operands, SumsResult(table, False, out))[:, 0]
