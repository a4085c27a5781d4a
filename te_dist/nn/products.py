"""The three matrix multiplications of a linear map, each in the formats of its operands.

[Note: What a linear map saves]
Forward quantizes the input once, into both directions, multiplies the rowwise one and saves the columnwise one: a
single quantized tensor, so that hooks on saved tensors see it as such. The weight is saved as it came in. A quantized
one is the very object that FSDP2 frees and fills again; a plain one is quantized again in backward, columnwise, rather
than kept in two formats. Backward quantizes the gradient once, into the directions that are needed. What is frozen
costs nothing: without wgrad the input is not saved, without dgrad the weight is not. Where an activation is computed in
front of the quantizer, its values are never written: its own input is saved, of which backward computes the gradient.

[Note: Rows that do not fit]
What sums over rows takes a multiple of them: bytes that hold several values, transforms and copies of 16 bytes are not
cut. Other numbers of rows are quantized as those of one group, whose columnwise codes are followed by zeros up to a
tile of 128; zeros are exact in every format: they raise no amax and add nothing to a sum. The bytes are those of a
matrix that was padded before, and nothing is copied for them. Such a matrix is given to both quantizers where one knows
no groups, or not of as many columns. Rows that nobody sums over are taken as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from te_dist._torch_private import applied, is_executed
from te_dist.codecs.gemm import READS_ANY_ORDER, Operand, multiply
from te_dist.formats import Direction
from te_dist.nn.fronts import FRONTS, Fronts
from te_dist.nn.once import once_differentiable
from te_dist.nn.plan import Plan
from te_dist.nn.saved import let_go, save, saved
from te_dist.ops.evaluate import values
from te_dist.ops.group_table import one_group
from te_dist.ops.panel_sums import column_sums, panel_sums
from te_dist.ops.source import Source, sums_shape
from te_dist.quantizers import Quantizer
from te_dist.tensor import GroupedRows, QuantizedStorage, QuantizedTensor, StorageKind

ROWWISE, COLUMNWISE = Direction.ROWWISE, Direction.COLUMNWISE
_ByDirection = dict[Direction, QuantizedStorage]  # what a product that sums along each direction reads
Apart = tuple[Sequence[Tensor], tuple[Any, ...]]  # see `taken_apart`


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, plan: Plan, **fronts: Unpack[Fronts]
) -> Tensor | tuple[Tensor, Tensor]:
    """`x` (..., K) times `weight` (N, K) transposed, plus `bias` (N,): (..., N) in the dtype of `x`.

    Args:
        x: plain, or a QuantizedTensor whose rowwise direction is multiplied and whose columnwise one is saved.
        weight: plain or quantized. Its gradient is plain, in its nominal dtype.
    """
    saves_input = torch.is_grad_enabled() and weight.requires_grad
    front, hands_to = fronts.get("front", ""), fronts.get("hands_to", "")
    return applied(_Linear, x, weight, bias, fronts.get("values"), plan, saves_input, front, hands_to)


class _Linear(torch.autograd.Function):
    """See [Note: What a linear map saves]."""

    @staticmethod
    def forward(  # noqa: PLR0913  (what autograd hands over)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        values: Tensor | None,
        plan: Plan,
        saves_input: bool,
        front: str,
        hands_to: str,
    ) -> Tensor | tuple[Tensor, Tensor]:
        (out, *buffers), kind = forward(x, weight, bias, plan, saves_input, front)
        ctx.plan, ctx.hands_to, ctx.has_values = plan, hands_to, values is not None
        ctx.shape, ctx.front = (x.shape, front) if values is None else (values.shape, "")
        ctx.parameter = weight if plan.fuses_wgrad and saves_input else None
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        inputs = None if kind is None else QuantizedTensor(kind.storage(buffers))
        wants_input = ctx.needs_input_grad[0] or ctx.needs_input_grad[3]
        rows = out if hands_to else None
        save(ctx, inputs, weight if wants_input else None, x if ctx.front and wants_input else None, rows, inputs=0)
        if rows is None:
            return out
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(rows)
        return rows, rows[..., : rows.shape[-1] // FRONTS[hands_to].widens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, weight, behind, rows = saved(ctx)
        if grads[-1] is None:  # nothing came of the values
            return (None,) * len(ctx.needs_input_grad)
        plan, (of_x, *wants, of_values) = ctx.plan, ctx.needs_input_grad[:4]
        wants = of_x or of_values, *wants
        if plan.fuses_wgrad and wants[1]:  # what is written beside autograd has to be asked for
            wants = wants[0], is_executed(ctx.next_functions[1][0]), wants[2]
        main_grad = main_grad_of(ctx.parameter) if wants[1] and plan.fuses_wgrad else None
        of = Backward(grads[-1], inputs, weight, main_grad, wants, ctx.shape, ctx.dtypes, behind, ctx.front)
        if ctx.hands_to:
            of = _read_handed(of, rows, grads[-1], ctx.hands_to, plan)
            let_go(ctx)
            del rows
        found = iter(backward(of, plan))
        if plan.moves is not None:
            plan.moves.move_when_backward_ends()
        returned = (wants[0], wants[1] and main_grad is None, wants[2])
        of_input, *others = (next(found) if wanted else None for wanted in returned)
        of_inputs = (None, *others, of_input) if ctx.has_values else (of_input, *others, None)
        return *of_inputs, None, None, None, None


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, saves_input: bool, front: str
) -> tuple[tuple[Tensor, ...], StorageKind | None]:
    """(output, buffers of the input that backward needs), what these are; no autograd."""
    return taped_forward(taken_apart(x, weight, bias), lambda: (x, weight, bias), plan, how=(saves_input, front))


def taped_forward(
    apart: Apart, whole: Callable[[], tuple[Tensor, Tensor, Tensor | None]], plan: Plan, *, how: tuple[bool, str]
) -> tuple[tuple[Tensor, ...], StorageKind | None]:
    """`forward` of input, weight and bias taken apart, which are wanted `whole` where no tape is played."""
    parts, kinds = apart
    return plan.tapes.run(("forward", kinds, *how), (*parts, *plan.tensors), lambda: _forward(*whole(), plan, *how))


def backward(of: Backward, plan: Plan) -> tuple[Tensor, ...]:
    """The gradients that are wanted, in order, but for that of the weight where it has a `main_grad`; no autograd."""
    grad, inputs, weight, main_grad, wants, shape, dtypes, behind, front, read = of
    tensors, kind = ((), None) if read is None else (read.tensors, read.kind)
    apart = taken_apart(grad, *tensors, inputs, weight, main_grad, behind)
    return taped_backward(apart, lambda: of, plan, key=(kind, wants, shape, dtypes, front))


def taped_backward(
    apart: Apart, whole: Callable[[], Backward], plan: Plan, *, key: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """`backward` of tensors taken apart, which are wanted `whole` where no tape is played; `key`: what else it is."""
    parts, kinds = apart
    key = ("backward", kinds, *key)
    return plan.tapes.run(key, (*parts, *plan.tensors), lambda: (_backward(whole(), plan), None))[0]


class Backward(NamedTuple):
    """What backward is about: `wants` a gradient of input, weight and bias, in the shape and the dtypes of these.

    The gradient of the weight is added to `main_grad` (fp32) where there is one. `behind` is the input itself where a
    `front` was computed of it, `read` what became of `grad` where it was read beforehand.
    """

    grad: Tensor | None
    inputs: QuantizedTensor | None
    weight: Tensor | None
    main_grad: Tensor | None
    wants: tuple[bool, bool, bool]
    shape: torch.Size
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None]
    behind: Tensor | None = None
    front: str = ""
    read: Gradient | None = None


class Gradient(NamedTuple):
    """That of an output, quantized along the directions that are wanted, and the sums of its columns, or None."""

    by_direction: _ByDirection
    sums: Tensor | None

    @property
    def storages(self) -> list[QuantizedStorage]:
        """Each once."""
        return list({id(storage): storage for storage in self.by_direction.values()}.values())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that this holds."""
        buffers = chain.from_iterable(storage.buffers.values() for storage in self.storages)
        return (*buffers, *(() if self.sums is None else (self.sums,)))

    @property
    def kind(self) -> tuple[Any, ...]:
        """What is to be known besides, to put it together again."""
        storages = self.storages
        kinds = tuple(StorageKind.of(each) for each in storages)
        ids = [id(each) for each in storages]
        places = tuple((direction, ids.index(id(each))) for direction, each in self.by_direction.items())
        return kinds, places, self.sums is not None


def put_together(tensors: Sequence[Tensor], kind: tuple[Any, ...]) -> Gradient:
    """The gradient of these tensors, of this kind."""
    (kinds, places, has_sums), left = kind, iter(tensors)
    storages = [each.storage([next(left) for _ in each.names]) for each in kinds]
    return Gradient({direction: storages[place] for direction, place in places}, next(left) if has_sums else None)


def _read_handed(of: Backward, rows: Tensor, grad: Tensor, front: str, plan: Plan) -> Backward:
    """What is left to do when the gradient of handed rows is quantized: a step of its own, behind which these go."""
    key = ("handed", of.wants, front)
    tensors, kind = plan.tapes.run(
        key, (grad, rows, *plan.tensors), lambda: _handed(rows, grad, front=front, wants=of.wants, plan=plan)
    )
    return of._replace(grad=None, read=put_together(tensors, kind))


def _handed(
    rows: Tensor, grad: Tensor, *, front: str, wants: tuple[bool, bool, bool], plan: Plan
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    source: Tensor | Source = FRONTS[front].gradient(_matrix(rows), _matrix(grad).contiguous())
    directions = directions_of(wants)
    if not directions or (_is_cut(source, plan, directions) and not _is_one_group(source, plan, directions)):
        source = values(source)
    read = _quantized_grad(source, plan, directions, wants[2])
    return read.tensors, read.kind


def directions_of(wants: tuple[bool, bool, bool]) -> tuple[Direction, ...]:
    """Along which the gradient of an output is quantized for gradients of input, weight and bias that are wanted."""
    wants_input, wants_weight, _ = wants
    return (ROWWISE,) * wants_input + (COLUMNWISE,) * wants_weight


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, saves_input: bool, front: str
) -> tuple[tuple[Tensor, ...], StorageKind | None]:
    """(output, buffers of the input that are saved), what these are."""
    inputs = quantized_input(x, plan, (ROWWISE, COLUMNWISE) if saves_input else (ROWWISE,), front=front)
    weights = _quantized_weight(weight, plan, ROWWISE)
    pair, shape = (operand(inputs[ROWWISE], ROWWISE), operand(weights, ROWWISE)), (*x.shape[:-1], weight.shape[0])
    out = _product(pair, shape, dtype=x.dtype, bias=bias)
    if not saves_input:
        return (out,), None
    buffers, saved = saved_part(inputs[COLUMNWISE])
    return (out, *buffers), saved


def saved_part(inputs: QuantizedStorage) -> tuple[tuple[Tensor, ...], StorageKind]:
    """What backward needs of the input: its buffers, and what these are."""
    part = columnwise_part(inputs)
    return tuple(part.buffers.values()), StorageKind.of(part)


def _backward(of: Backward, plan: Plan) -> tuple[Tensor, ...]:
    """The gradients that are wanted, in order."""
    grad, inputs, weight, main_grad, (wants_input, wants_weight, wants_bias), shape, dtypes, behind, front, read = of
    gradients = []
    if read is None:
        assert grad is not None, "there is a gradient, or what became of it"
        read = _quantized_grad(grad, plan, directions_of(of.wants), wants_bias)
    grads, sums = read
    if wants_input:
        assert weight is not None, "saved where the gradient of the input is wanted"
        weights = _quantized_weight(weight, plan, COLUMNWISE)
        pair = operand(grads[ROWWISE], ROWWISE), operand(weights, COLUMNWISE)
        if behind is not None:
            matrix = _matrix(behind).contiguous()
            product = multiply(*pair, dtype=dtypes[0])[: matrix.shape[0]]
            gradients.append(_shaped(values(FRONTS[front].gradient(matrix, product)), shape))
        else:
            gradients.append(_product(pair, shape, dtype=dtypes[0]))
    if wants_weight:
        assert inputs is not None, "saved where the gradient of the weight is wanted"
        pair = operand(grads[COLUMNWISE], COLUMNWISE), operand(inputs.storage, COLUMNWISE)
        if main_grad is None:
            gradients.append(multiply(*pair, dtype=dtypes[1]))
        else:
            multiply(*pair, dtype=torch.float32, out=main_grad, accumulate=True)
    if sums is not None:
        gradients.append(sums.to(dtypes[2]))
    return tuple(gradients)


def _quantized_grad(grad: Tensor | Source, plan: Plan, directions: tuple[Direction, ...], wants_sums: bool) -> Gradient:
    """`grad` along `directions`, and the sums of its columns, in one pass over it where one quantizer sees it whole."""
    quantizer = plan.grad_output
    if wants_sums and directions and isinstance(quantizer, Quantizer):
        if _is_one_group(grad, plan, directions):
            matrix = _contiguous(grad)
            table = one_group(matrix.shape[0], matrix.device)
            rows, sums = quantizer.encode_groups_and_sum(matrix, table, *directions)
            return Gradient(_of_one_group(rows, directions), sums[0])
        storage, sums = quantizer.encode_and_sum(_fitting(grad, plan, directions), *directions)
        return Gradient(dict.fromkeys(directions, storage), sums)
    grads = _encoded(grad, quantizer, plan, directions) if directions else {}
    if not wants_sums:
        return Gradient(grads, None)
    assert isinstance(grad, Tensor), "sources are read in one pass"
    matrix = _matrix(grad.dequantize() if isinstance(grad, QuantizedTensor) else grad).contiguous()
    panels = torch.empty(sums_shape(matrix), dtype=torch.float32, device=matrix.device)
    panel_sums(matrix, out=panels)
    return Gradient(grads, column_sums(panels))


def main_grad_of(weight: Tensor) -> Tensor:
    """Where the gradient of `weight` is added up."""
    if weight.is_meta:  # a rehearsal, see [Note: Kernels ahead of time]
        return torch.empty(weight.shape, dtype=torch.float32, device="meta")
    found = getattr(weight, "main_grad", None)
    if not isinstance(found, Tensor):
        raise RuntimeError(
            f"fuse_wgrad_accumulation adds the gradient of the weight to its main_grad, got {found!r}; set "
            "weight.main_grad to zeros (fp32, of the weight's shape) before backward"
        )
    if found.dtype != torch.float32 or found.shape != weight.shape or not found.is_contiguous():
        raise RuntimeError(
            f"main_grad: got {found.dtype} of shape {tuple(found.shape)} and strides {found.stride()}, wanted fp32 of "
            f"shape {tuple(weight.shape)}, contiguous"
        )
    return found


def taken_apart(*tensors: Tensor | None) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """The plain tensors that tensors are made of; and what else is to be known of each, None where there is none."""
    parts: list[Tensor] = []
    kinds: list[Any] = []
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensor):
            storage = tensor.storage
            parts += storage.buffers.values()
            kinds.append((storage.format, storage.region, storage.dtype, tensor.shape, tuple(storage.buffers)))
        elif tensor is not None:
            parts.append(tensor)
            kinds.append(Tensor)
        else:
            kinds.append(None)
    return tuple(parts), tuple(kinds)


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


def quantized_input(x: Tensor, plan: Plan, directions: tuple[Direction, ...], *, front: str) -> _ByDirection:
    """`x`, or what is computed of it, as a product along each of `directions` reads it."""
    if not isinstance(x, QuantizedTensor):
        return _encoded(x, plan.input, plan, directions, front=front)
    if _is_cut(x, plan, directions):
        raise ValueError(
            f"a quantized input of {x.storage.shape[0]} rows does not fit the product with the gradient, which takes "
            f"multiples of {plan.row_multiple}; pad it with zeros before quantizing, or pass it unquantized"
        )
    return dict.fromkeys(directions, x.storage)


def _encoded(
    x: Tensor | Source, quantizer: Quantizer, plan: Plan, directions: tuple[Direction, ...], *, front: str = ""
) -> _ByDirection:
    """`x`, or what is computed of it, quantized. See [Note: Rows that do not fit]."""
    is_one_group = _is_one_group(x, plan, directions)
    matrix = _contiguous(x) if is_one_group else _fitting(x, plan, directions)
    source = matrix
    if front:
        assert isinstance(matrix, Tensor), "a source has no front"
        source = FRONTS[front].source(matrix.contiguous())
    if not is_one_group:
        return dict.fromkeys(directions, quantizer.encode(source, *directions))
    rows = quantizer.encode_groups(source, one_group(matrix.shape[0], matrix.device), *directions)
    return _of_one_group(rows, directions)


def _is_cut(x: Tensor | Source, plan: Plan, directions: tuple[Direction, ...]) -> bool:
    """Whether a product is to sum over another number of rows than it takes."""
    return COLUMNWISE in directions and math.prod(x.shape[:-1]) % plan.row_multiple != 0


def _is_one_group(x: Tensor | Source, plan: Plan, directions: tuple[Direction, ...]) -> bool:
    """Whether rows are quantized as those of one group, see [Note: Rows that do not fit]; of both operands alike."""
    return _is_cut(x, plan, directions) and plan.takes_groups


def _of_one_group(rows: GroupedRows, directions: tuple[Direction, ...]) -> _ByDirection:
    """As matrices, of which each has what is one value for the group."""
    found = {}
    for direction in directions:
        part = rows.as_matrix(direction)
        shapes = {field.name: field.shape(part.region) for field in part.format[direction].fields}
        part.buffers.update({name: part.buffers[name].view(shape) for name, shape in shapes.items() if shape == (1, 1)})
        found[direction] = part
    return found


def _quantized_weight(weight: Tensor, plan: Plan, direction: Direction) -> QuantizedStorage:
    return weight.storage if isinstance(weight, QuantizedTensor) else plan.weight.encode(weight, direction)


def columnwise_part(inputs: QuantizedStorage) -> QuantizedStorage:
    """What wgrad reads of the input, and nothing else."""
    if COLUMNWISE in inputs.directions:
        return inputs.select(COLUMNWISE)
    if inputs.format.columnwise_is_derivable:
        return inputs
    raise ValueError(
        "the gradient of the weight needs the columnwise direction of the quantized input, which has the rowwise one "
        "only; quantize it with columnwise=True, or freeze the weight"
    )


def _fitting(x: Tensor | Source, plan: Plan, directions: tuple[Direction, ...]) -> Tensor | Source:
    """`x` (..., K) as a matrix, its rows padded with zeros where a product sums over them. A source fits.

    The rows that these make in other products are dropped.
    """
    if not _is_cut(x, plan, directions):
        return x if isinstance(x, Source) else _matrix(x)
    assert isinstance(x, Tensor), "a source fits"
    matrix = _matrix(x)
    return F.pad(matrix, (0, 0, 0, -matrix.shape[0] % plan.row_multiple))


def _product(
    pair: tuple[Operand, Operand], shape: Sequence[int], *, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """That of both in `shape`, whose leading dimensions are the rows of the first; no view, see `_shaped`."""
    (a, b), rows = pair, math.prod(shape[:-1])
    if a.extents[0] != rows:  # there are padded ones behind them
        return _shaped(multiply(a, b, dtype=dtype, bias=bias), shape)
    out = torch.empty(shape, dtype=dtype, device=a.device)
    multiply(a, b, dtype=dtype, out=out.view(rows, b.extents[0]), bias=bias)
    return out


def _shaped(product: Tensor, shape: Sequence[int]) -> Tensor:
    """The first rows of `product` as `shape`; no view to autograd, since FSDP2 warns of modules that return one."""
    rows = math.prod(shape[:-1])
    product = product if rows == product.shape[0] else product[:rows]
    return product if product.shape == tuple(shape) else torch.ops.aten._unsafe_view(product, shape)


def _contiguous(x: Tensor | Source) -> Tensor | Source:
    return x if isinstance(x, Source) else _matrix(x).contiguous()


def _matrix(x: Tensor) -> Tensor:
    if isinstance(x, QuantizedTensor):  # as its storage is; a view of it is nothing that can be recorded
        return QuantizedTensor(x.storage)
    return x.flatten(0, -2) if x.dim() > 1 else x[None]
