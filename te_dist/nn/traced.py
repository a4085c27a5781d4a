"""Linear maps under torch.compile: two ops that a compiler does not look into.

[Note: Compiled linear maps]
A graph holds `te_dist::linear_forward` and `te_dist::linear_backward`, which do what a pass in eager mode does, so that
the bits are the same. Their tensors are plain: a quantized weight is handed over as its buffers, what is saved of the
input comes back as buffers. How to compute is said by name: the text of a plan, or of a format, stands in the graph as
a constant, see [Note: Plans in graphs]. A plan is found while a graph is traced, and the graph is guarded by the recipe
it was found for. The number of rows may be a symbol: a graph serves all numbers, or, where products take multiples,
those that fit or all others. State that lives in Python (histories of delayed scaling, the process groups of tensor
parallelism, main gradients) is not in a graph, nor is a weight of which backward is to gather the other direction: such
maps stay outside of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_dist._torch_private import are_transforms_active
from te_dist.formats import Direction, Format, Region
from te_dist.nn import lost_recipes
from te_dist.nn.graph_plans import plan_named
from te_dist.nn.once import torch_once_differentiable
from te_dist.nn.products import Backward, backward, forward, quantized_input, saved_part
from te_dist.nn.spelled import made_of
from te_dist.ops._library import LIBRARY
from te_dist.ops.group_table import TILE
from te_dist.tensor import OPS, QuantizedStorage, QuantizedTensor, StorageKind

PLAIN = ""  # kind of a plain weight
BOTH = tuple(Direction)
_kinds: dict[str, Kind] = {}
_saved: dict[Any, Saved] = {}  # by plan, front, and shape and type of the input
_MAX_SAVED = 4096  # more than passes wait for their backward, of other shapes each


class Kind(NamedTuple):
    """A quantized weight without its buffers."""

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
    if trains and _is_exporting():
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
def _is_exporting() -> bool:
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
        out, *buffers = torch.ops.te_dist.linear_forward(x, [weight], bias, plan, PLAIN, *how)
        ctx.plan, ctx.shape, ctx.front = plan, x.shape, how[-1]
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(*buffers, weight, x if ctx.front else None)
        return out

    @staticmethod
    @torch_once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *buffers, weight, behind = ctx.saved_tensors
        wants = ctx.needs_input_grad[:3]
        place = ctx.plan, PLAIN, list(wants), ctx.shape, *ctx.dtypes, behind, ctx.front
        grads = iter(torch.ops.te_dist.linear_backward(grad, buffers, [weight], *place))
        return *(next(grads) if wanted else None for wanted in wants), *(None,) * 4


def _weight(parts: Sequence[Tensor], kind: str) -> Tensor:
    if kind == PLAIN:
        return parts[0]
    known = _kinds.get(kind) or made_of(kind, Kind)
    buffers = dict(zip(known.names, parts, strict=True))
    return QuantizedTensor(QuantizedStorage(known.format, buffers, known.region, dtype=known.dtype), known.shape)


def _forward(x: Tensor, weight: list[Tensor], bias: Tensor | None, plan: str, *rest: Any) -> list[Tensor]:
    kind, saves_input, reads_columns, front = rest
    whole = _weight(weight, kind)
    lost_recipes.forward(plan, records=saves_input or reads_columns)
    tensors, saved = forward(x, whole, bias, plan_named(plan), saves_input, front)
    return returned(tensors, saved, place=(plan, front, x.shape, x.dtype), saved=_saved)


def _fake_forward(x: Tensor, weight: list[Tensor], bias: Tensor | None, plan: str, *rest: Any) -> list[Tensor]:
    kind, saves_input, _, front = rest
    out = x.new_empty((*x.shape[:-1], _weight(weight, kind).shape[0]))
    if not saves_input:
        return [out]
    return [out, *_fake_saved(x, plan, front)]


def _fake_saved(x: Tensor, plan: str, front: str) -> list[Tensor]:
    """The buffers of the saved input, whose number of rows may be a symbol: those of a sample, with as many rows.

    A graph is for numbers that fit products, or for others, see [Note: Rows that do not fit].
    """
    *leading, cols = x.shape
    rows, multiple = math.prod(leading), plan_named(plan).row_multiple
    is_cut = bool(rows % multiple)
    sample = x.new_empty((TILE * multiple + is_cut, int(cols)))
    buffers, saved = saved_part(quantized_input(sample, plan_named(plan), BOTH, front=front)[Direction.COLUMNWISE])
    sampled, cols = saved.region.shape
    unit = math.gcd(TILE, sampled) if is_cut else 1
    fields = {field.name: field for field in saved.format.fields}
    shapes = (fields[name].shape_of(-(-rows // unit) * unit, cols) for name in saved.names)
    return [x.new_empty(math.prod(shape), dtype=made.dtype) for shape, made in zip(shapes, buffers, strict=True)]


def _backward(grad: Tensor, inputs: list[Tensor], weight: list[Tensor], plan: str, *rest: Any) -> list[Tensor]:
    lost_recipes.backward(plan)
    kind, wants, shape, *dtypes, behind, front = rest
    saved = _saved[plan, front, torch.Size(shape), dtypes[0]] if wants[1] else None
    stored = None if saved is None else QuantizedTensor(saved.storage(inputs))
    place = None, tuple(wants), torch.Size(shape), tuple(dtypes), behind, front
    of = Backward(grad, stored, _weight(weight, kind), *place)
    return list(backward(of, plan_named(plan)))


def _fake_backward(grad: Tensor, inputs: list[Tensor], weight: list[Tensor], plan: str, *rest: Any) -> list[Tensor]:
    kind, wants, shape, *dtypes, _, _ = rest
    rows, cols = _weight(weight, kind).shape
    shapes = (shape, (rows, cols), (rows,))
    asked = zip(wants, shapes, dtypes, strict=True)
    return [grad.new_empty(extents, dtype=dtype) for wanted, extents, dtype in asked if wanted]


def holds(weight: Tensor, *, multiplies: bool) -> bool:
    """Whether a graph may be given a weight, which it saves for backward; `multiplies`: by its columnwise direction.

    FSDP2 may gather a direction for each pass, into the weight, which eager mode saves, and not into buffers.
    """
    return not (multiplies and torch.is_grad_enabled() and isinstance(weight, QuantizedTensor)) or _has_columns(weight)


@torch.compiler.assume_constant_result
def _has_columns(weight: QuantizedTensor) -> bool:
    # NOTE: compilers hand over the weight itself, and guard graphs by the names of its buffers.
    storage = weight.storage
    return Direction.COLUMNWISE in storage.lasting_directions or storage.format.columnwise_is_derivable


def _define() -> None:
    """Registers both ops, and what they do with a quantized weight."""
    # NOTE: a pass may draw random numbers, so equal calls are not one.
    tags = (torch.Tag.nondeterministic_seeded,)
    LIBRARY.define(
        "linear_forward(Tensor x, Tensor[] weight, Tensor? bias, str plan, str kind, bool saves_input, "
        "bool reads_columns, str front) -> Tensor[]",
        tags=tags,
    )
    LIBRARY.define(
        "linear_backward(Tensor grad, Tensor[] inputs, Tensor[] weight, str plan, str kind, bool[] wants, "
        "SymInt[] shape, ScalarType input_dtype, ScalarType weight_dtype, ScalarType? bias_dtype, "
        "Tensor? behind, str front) -> Tensor[]",
        tags=tags,
    )
    for name, function, fake in (
        ("linear_forward", _forward, _fake_forward),
        ("linear_backward", _backward, _fake_backward),
    ):
        LIBRARY.impl(name, function, "CPU")
        LIBRARY.impl(name, function, "CUDA")
        torch.library.register_fake(f"te_dist::{name}", fake, lib=LIBRARY)
    refuse_backward("linear_forward")


def refuse_backward(name: str) -> None:
    """Has an op raise in backward where autograd sees itself: in programs of torch.export, which have no Function."""

    def backward(ctx: Any, *grads: Any) -> None:
        raise NotImplementedError(
            f"te_dist::{name}: got a backward pass through a program of torch.export, wanted none, since it has no "
            "gradients of te_dist's maps; train the module that was exported"
        )

    torch.library.register_autograd(f"te_dist::{name}", backward, lib=LIBRARY)


_define()
_WEIGHT_PLACE = {torch.ops.te_dist.linear_forward.default: 1, torch.ops.te_dist.linear_backward.default: 2}
_KIND_PLACE = 4


@OPS.implements(*_WEIGHT_PLACE)
def _unwrapped(func: Any, args: Any, kwargs: Any) -> Any:
    """The same op on the buffers of a quantized weight; see `nn.traced`."""
    place = _WEIGHT_PLACE[func]
    (weight,), arguments = args[place], list(args)
    storage = weight.storage
    shape = torch.Size(map(int, weight.shape))  # which a compiler may take for symbols: a graph is for these extents
    kind = Kind(storage.format, storage.region, storage.dtype, shape, tuple(storage.buffers))
    arguments[place], arguments[_KIND_PLACE] = list(storage.buffers.values()), repr(kind)
    _kinds.setdefault(repr(kind), kind)
    return func(*arguments, **kwargs)
