"""Linear maps under torch.compile: two ops that a compiler does not look into.

[Note: Compiled linear maps]
A graph holds `te_dist::linear_forward` and `te_dist::linear_backward`, which do what a pass in eager mode does, so that
the bits are the same. Their tensors are plain: a quantized weight is handed over as its buffers, what is saved of the
input comes back as buffers. How to compute is said by name: the text of a plan, or of a format, stands in the graph as
a constant, see [Note: Plans in graphs]. A plan is found while a graph is traced, and the graph is guarded by the recipe
it was found for. The number of rows may be a symbol: a graph serves all numbers, or, where products take multiples,
those that fit or all others. State that lives in Python (histories of delayed scaling, main gradients) is not in a
graph, nor is a weight of which backward is to gather the other direction: such maps stay outside of it. Those that
tensor parallelism cuts are in `traced_parallel`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from te_dist._torch_private import are_transforms_active
from te_dist.formats import Direction, Format, Region
from te_dist.nn import lost_recipes
from te_dist.nn.graph_plans import draws, plan_named
from te_dist.nn.once import torch_once_differentiable
from te_dist.nn.products import (
    Backward,
    columnwise_part,
    quantized_input,
    saved_part,
    taped_backward,
    taped_forward,
)
from te_dist.nn.spelled import made_of
from te_dist.ops._library import LIBRARY
from te_dist.ops.group_table import TILE
from te_dist.tensor import OPS, QuantizedStorage, QuantizedTensor, StorageKind
from te_dist.tensor.placement import local_tensor
from te_dist.tensor_parallel.spread import PlacedQuantizer

PLAIN = ""  # kind of a plain weight
BOTH = tuple(Direction)
_kinds: dict[str, Kind] = {}
_saved: dict[Any, Saved] = {}  # by plan, front, and shape and type of the input
_MAX_SAVED = 4096  # more than passes wait for their backward, of other shapes each


class Kind(NamedTuple):
    """A quantized tensor without its buffers."""

    format: Format
    region: Region
    dtype: torch.dtype
    shape: torch.Size
    names: tuple[str, ...]


class Saved(NamedTuple):
    """What the flat buffers that a pass returns for its backward are."""

    kind: StorageKind
    shapes: tuple[torch.Size, ...]

    def storage(self, buffers: Sequence[Tensor]) -> QuantizedStorage:
        """The storage of these."""
        return self.kind.storage([each.view(shape) for each, shape in zip(buffers, self.shapes, strict=True)])


def returned(
    tensors: Sequence[Tensor], kind: StorageKind | None, *, place: Any, saved: dict[Any, Saved]
) -> list[Tensor]:
    """(output, buffers of `kind`) as an op returns them: flat, since a compiler asks of symbols whether they are one.

    What they are is noted at a `place` of `saved`, until backward; every pass that has any notes it.
    """
    out, *buffers = tensors
    if kind is not None:
        saved.pop(place, None)
        saved[place] = Saved(kind, tuple(each.shape for each in buffers))
    if len(saved) > _MAX_SAVED:
        saved.pop(next(iter(saved)), None)
    return [out, *(each.flatten() for each in buffers)]


def check_not_exported(label: str, recipe: object) -> None:
    """Raises NotImplementedError where torch.export traces what is left outside of graphs: a program has no outside."""
    if torch.compiler.is_exporting():
        raise NotImplementedError(
            f"{label}: got {recipe} in torch.export, wanted what a graph holds, which state in Python is not (delayed "
            "scaling, tensor parallelism, main gradients, experts over ranks, weights kept over micro batches); export "
            "it on one rank, by Float8CurrentScaling, MXFP8BlockScaling or another recipe without histories"
        )


def check_differentiable(label: str, *, trains: bool) -> None:
    """Raises NotImplementedError where a graph would hold a map whose gradients nobody computes.

    In transforms of torch.func compilers see no tensor that wants a gradient, and leave backward out; a program of
    torch.export has none. `label` is no name of the map, which graphs would be guarded by.
    """
    if trains and is_exporting():
        raise NotImplementedError(
            f"{label}: got training mode in torch.export, wanted a module that is evaluated, since programs have no "
            "backward pass of it; call eval() before"
        )
    if _are_transforms_active():
        raise NotImplementedError(
            f"{label}: got a transform of torch.func in a graph, wanted gradients of a backward pass: call backward() "
            "or torch.autograd.grad"
        )


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Whether torch.export traces."""
    return torch.compiler.is_exporting()  # which torch 2.11 takes for true in all graphs


@torch.compiler.assume_constant_result
def _are_transforms_active() -> bool:
    return are_transforms_active()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, plan: str, front: str = "") -> Tensor:
    """`products.linear` by the plan of that name."""
    differentiates = torch.is_grad_enabled()
    how = differentiates and weight.requires_grad, differentiates and x.requires_grad, front
    return _Linear.apply(x, weight, bias, plan, *how)


class _Linear(torch.autograd.Function):
    """As that of `products`, with what is saved in plain tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: str, *how: Any) -> Tensor:
        out, inputs = forward_op(x, weight, bias, plan=plan, how=how)
        ctx.plan, ctx.shape, ctx.front = plan, x.shape, how[-1]
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(*inputs, weight, x if ctx.front else None)
        return out

    @staticmethod
    @torch_once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, weight, behind = ctx.saved_tensors
        of = ctx.plan, ctx.needs_input_grad[:3], ctx.shape, ctx.dtypes
        return *backward_op(grad, inputs, weight, of=of, front=(behind, ctx.front)), *(None,) * 4


def forward_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, plan: str, how: tuple[bool, bool, str]
) -> tuple[Tensor, list[Tensor]]:
    """(output, what backward needs of the input): of one that is quantized itself.

    `how`: whether that is wanted, whether the gradient of the input is, the activation in front.
    """
    saves_input, reads_columns, front = how
    keeps_own = saves_input and isinstance(x, QuantizedTensor)
    wants = saves_input and not keeps_own, reads_columns, front
    is_drawn = draws(plan, "input", "weight")
    op = torch.ops.te_dist.linear_forward_drawing if is_drawn else torch.ops.te_dist.linear_forward
    out, *buffers = op(x, [], [weight], bias, plan, [PLAIN, PLAIN], *wants)
    return out, [x] if keeps_own else buffers


def backward_op(
    grad: Tensor,
    inputs: list[Tensor],
    weight: Tensor,
    *,
    of: tuple[str, tuple[bool, ...], Sequence[int], tuple[torch.dtype | None, ...]],
    front: tuple[Tensor | None, str] = (None, ""),
) -> list[Tensor | None]:
    """Gradients of input, weight and bias, None where one is not wanted.

    `of`: the plan, which are wanted, shape of the input, types of all three. `front`: as of `Backward`.
    """
    plan, wants, shape, dtypes = of
    place = plan, [PLAIN] * 3, list(wants), shape, *dtypes, *front
    is_drawn = draws(plan, "weight", "grad_output")
    op = torch.ops.te_dist.linear_backward_drawing if is_drawn else torch.ops.te_dist.linear_backward
    found = iter(op(grad, [], inputs, [weight], *place))
    return [next(found) if wanted else None for wanted in wants]


def _kind_of(kind: str) -> Any:
    """As `products.taken_apart` has it."""
    return Tensor if kind == PLAIN else _kinds.get(kind) or made_of(kind, Kind)


def _whole(parts: Sequence[Tensor], kind: str) -> Tensor:
    """What was handed over: a plain tensor as it is, a quantized one as its buffers."""
    if kind == PLAIN:
        return parts[0]
    known = _kind_of(kind)
    buffers = dict(zip(known.names, parts, strict=True))
    return QuantizedTensor(QuantizedStorage(known.format, buffers, known.region, dtype=known.dtype), known.shape)


def _forward(x: Tensor, more: list[Tensor], weight: list[Tensor], *rest: Any) -> list[Tensor]:
    bias, plan, (kind, kind_of_weight), saves_input, reads_columns, front = rest
    lost_recipes.forward(plan, records=saves_input or reads_columns)
    parts = (x, *more, *weight) if bias is None else (x, *more, *weight, bias)
    kinds = _kind_of(kind), _kind_of(kind_of_weight), None if bias is None else Tensor
    tensors, saved = taped_forward(
        (parts, kinds),
        lambda: (_whole([x, *more], kind), _whole(weight, kind_of_weight), bias),
        plan_named(plan),
        how=(saves_input, front),
    )
    given = x if kind == PLAIN else kinds[0]
    return returned(tensors, saved, place=(plan, front, given.shape, given.dtype), saved=_saved)


def _fake_forward(x: Tensor, more: list[Tensor], weight: list[Tensor], *rest: Any) -> list[Tensor]:
    _, plan, (kind, kind_of_weight), saves_input, _, front = rest
    rows = _whole([x, *more], kind)
    out = x.new_empty((*rows.shape[:-1], _whole(weight, kind_of_weight).shape[0]), dtype=rows.dtype)
    return [out, *_fake_saved(rows, plan, front)] if saves_input else [out]


def _fake_saved(x: Tensor, plan: str, front: str) -> list[Tensor]:
    """The buffers of the saved input, whose number of rows may be a symbol: those of a sample, with as many rows.

    A graph is for numbers that fit products, or for others, see [Note: Rows that do not fit].
    """
    *leading, cols = x.shape
    rows, multiple = math.prod(leading), plan_named(plan).row_multiple
    is_cut = bool(rows % multiple)
    sample = x.new_empty((TILE * multiple + is_cut, int(cols)))
    known = plan_named(plan)
    if isinstance(known.input, PlacedQuantizer):
        known = replace(known, input=known.input.alone)
    buffers, saved = saved_part(quantized_input(sample, known, BOTH, front=front)[Direction.COLUMNWISE])
    sampled, cols = len(saved.region.rows), saved.region.cols
    unit = math.gcd(TILE, sampled) if is_cut else 1
    fields = {field.name: field for field in saved.format.fields}
    shapes = (fields[name].shape_of(-(-rows // unit) * unit, cols) for name in saved.names)
    return [x.new_empty(math.prod(shape), dtype=made.dtype) for shape, made in zip(shapes, buffers, strict=True)]


def _backward(grad: Tensor, more: list[Tensor], inputs: list[Tensor], weight: list[Tensor], *rest: Any) -> list[Tensor]:
    plan, (kind, kind_of_inputs, kind_of_weight), wants, shape, *dtypes, behind, front = rest
    lost_recipes.backward(plan)
    wants, shape, dtypes = tuple(wants), torch.Size(shape), tuple(dtypes)
    saved = _saved[plan, front, shape, dtypes[0]] if wants[1] and kind_of_inputs == PLAIN else None
    of_inputs = None if not wants[1] else saved or _kind_of(kind_of_inputs)

    def whole() -> Backward:
        stored: Any = None
        if wants[1]:
            stored = _whole(inputs, kind_of_inputs) if saved is None else QuantizedTensor(saved.storage(inputs))
        given = _whole([grad, *more], kind), stored, _whole(weight, kind_of_weight)
        return Backward(*given, None, wants, shape, dtypes, behind, front)

    parts = grad, *more, *(inputs if wants[1] else ()), *weight, *(() if behind is None else (behind,))
    kinds = _kind_of(kind), of_inputs, _kind_of(kind_of_weight), None, None if behind is None else Tensor
    return list(taped_backward((parts, kinds), whole, plan_named(plan), key=(None, wants, shape, dtypes, front)))


def _fake_backward(
    grad: Tensor, more: list[Tensor], inputs: list[Tensor], weight: list[Tensor], *rest: Any
) -> list[Tensor]:
    _, (_, _, kind_of_weight), wants, shape, *dtypes, _, _ = rest
    rows, cols = _whole(weight, kind_of_weight).shape
    shapes = (shape, (rows, cols), (rows,))
    asked = zip(wants, shapes, dtypes, strict=True)
    return [grad.new_empty(extents, dtype=dtype) for wanted, extents, dtype in asked if wanted]


def holds(weight: Tensor, *, multiplies: bool) -> bool:
    """Whether a graph may be given a weight, which it saves for backward; `multiplies`: by its columnwise direction.

    FSDP2 may gather a direction for each pass, into the weight, which eager mode saves, and not into buffers.
    """
    is_read = multiplies and torch.is_grad_enabled() and isinstance(weight, (QuantizedTensor, DTensor))
    return not is_read or _has_columns(weight)


@torch.compiler.assume_constant_result
def _has_columns(weight: Tensor) -> bool:
    # NOTE: compilers hand over the weight itself, and guard graphs by the names of its buffers.
    local = local_tensor(weight)
    if not isinstance(local, QuantizedTensor):
        return True
    storage = local.storage
    return Direction.COLUMNWISE in storage.lasting_directions or storage.format.columnwise_is_derivable


def define(name: str, schema: str, function: Any, *, fake: Any) -> None:
    """Registers an op of linear maps and, as `<name>_drawing`, the same for plans that draw random numbers.

    Of these no two calls are one, and what runs a pass again has to restore the generator, which costs time.
    """
    for own, tags in ((name, ()), (f"{name}_drawing", (torch.Tag.nondeterministic_seeded,))):
        LIBRARY.define(f"{own}({schema}", tags=tags)
        LIBRARY.impl(own, function, "CPU")
        LIBRARY.impl(own, function, "CUDA")
        torch.library.register_fake(f"te_dist::{own}", fake, lib=LIBRARY)


def refuse_backward(name: str) -> None:
    """Has an op raise in backward where autograd sees itself: in programs of torch.export, which have no Function."""

    def backward(ctx: Any, *grads: Any) -> None:
        raise NotImplementedError(
            f"te_dist::{name}: got a backward pass through a program of torch.export, wanted none, since it has no "
            "gradients of te_dist's maps; train the module that was exported"
        )

    torch.library.register_autograd(f"te_dist::{name}", backward, lib=LIBRARY)


define(
    "linear_forward",
    "Tensor x, Tensor[] more, Tensor[] weight, Tensor? bias, str plan, str[] kinds, bool saves_input, "
    "bool reads_columns, str front) -> Tensor[]",
    _forward,
    fake=_fake_forward,
)
define(
    "linear_backward",
    "Tensor grad, Tensor[] more, Tensor[] inputs, Tensor[] weight, str plan, str[] kinds, bool[] wants, "
    "SymInt[] shape, ScalarType input_dtype, ScalarType weight_dtype, ScalarType? bias_dtype, Tensor? behind, "
    "str front) -> Tensor[]",
    _backward,
    fake=_fake_backward,
)
refuse_backward("linear_forward")
refuse_backward("linear_forward_drawing")
_KINDS_PLACE = 5
# Of what may be quantized beside the first argument, whose other buffers follow it: places, in the order of its kinds.
_LISTS = {
    torch.ops.te_dist.linear_forward.default: (2,),
    torch.ops.te_dist.linear_forward_drawing.default: (2,),
    torch.ops.te_dist.linear_backward.default: (2, 3),
    torch.ops.te_dist.linear_backward_drawing.default: (2, 3),
}


@OPS.implements(*_LISTS)
def _unwrapped(func: Any, args: Any, kwargs: Any) -> Any:
    """The same op on the buffers of what is quantized; see `nn.traced`."""
    arguments, kinds = list(args), list(args[_KINDS_PLACE])
    if isinstance(args[0], QuantizedTensor):
        (arguments[0], *arguments[1]), kinds[0] = _taken_apart(args[0].storage, args[0].shape)
    for number, place in enumerate(_LISTS[func], start=1):
        if len(args[place]) == 1 and isinstance(tensor := args[place][0], QuantizedTensor):
            is_input = place != _LISTS[func][-1]  # saved for backward, which reads it along its columns
            storage = columnwise_part(tensor.storage) if is_input else tensor.storage
            arguments[place], kinds[number] = _taken_apart(storage, tensor.shape)
    arguments[_KINDS_PLACE] = kinds
    return func(*arguments, **kwargs)


def _taken_apart(storage: QuantizedStorage, shape: Sequence[int]) -> tuple[list[Tensor], str]:
    """The buffers of a quantized tensor of this shape, and the text of what they are."""
    extents = torch.Size(map(int, shape))  # which a compiler may take for symbols: a graph is for these
    kind = Kind(storage.format, storage.region, storage.dtype, extents, tuple(storage.buffers))
    text = repr(kind)
    _kinds.setdefault(text, kind)
    return list(storage.buffers.values()), text
