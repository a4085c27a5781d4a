"""Linear maps of rows in groups under torch.compile: two ops that a compiler does not look into.

As for other linear maps, see [Note: Compiled linear maps]. What is saved comes back as buffers; quantized weights are
handed over as theirs, those of every group one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_dist.formats import Direction, Format, Group, Region
from te_dist.grouped import OPS as OF_GROUPS
from te_dist.grouped import GroupedStorage, GroupedTensor
from te_dist.nn import grouped_products as products
from te_dist.nn import lost_recipes
from te_dist.nn.group_fronts import SWIGLU, WEIGHTED_SWIGLU
from te_dist.nn.grouped_products import Given
from te_dist.nn.grouped_weights import as_one, shape_of
from te_dist.nn.once import torch_once_differentiable
from te_dist.nn.plan import Plan
from te_dist.nn.traced import check_columns, keep
from te_dist.ops._library import LIBRARY
from te_dist.tensor import OPS, QuantizedStorage, QuantizedTensor, StorageKind
from te_dist.tensor.grouped_rows import allocations

PLAIN = ""  # kind of plain weights, and name of no front
FRONTS = {PLAIN: None} | {str(front.name): front for front in (SWIGLU, WEIGHTED_SWIGLU)}
SAMPLE = 256  # rows, in the place of a number that may be a symbol
_CONSTANTS = 9  # arguments in front of weights
_plans: dict[str, Plan] = {}
_kinds: dict[str, _Kind] = {}
_saved: dict[Any, StorageKind | None] = {}  # by plan, how, and shape and type of the input


class _Kind(NamedTuple):
    """Quantized weights without their buffers; of each group, or (`is_group`) of all."""

    format: Format
    region: Region
    dtype: torch.dtype
    names: tuple[str, ...]
    is_group: bool
    num_members: int

    def weights(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """With these buffers."""
        size = len(self.names)
        each = [dict(zip(self.names, parts[i : i + size], strict=True)) for i in range(0, len(parts), size)]
        if self.is_group:
            group = Group.whole(self.num_members, *self.region.shape)
            return [GroupedTensor(GroupedStorage(self.format, each[0], group, dtype=self.dtype))]
        return [QuantizedTensor(QuantizedStorage(self.format, b, self.region, dtype=self.dtype)) for b in each]


class How(NamedTuple):
    """What of a call is no tensor.

    Names of plan and front, whether the input is saved as it is, numbers, and whether backward reads what is saved of
    the input, and the columnwise direction of the weights.
    """

    plan: str
    front: str
    saves_original: bool
    num_weights: int
    num_biases: int
    saves_input: bool
    reads_columns: bool

    def given(self, table: Tensor) -> Given:
        """As the products take it."""
        return Given(table, _plans[self.plan], front=FRONTS[self.front], saves_original=self.saves_original)


def name_of(plan: Plan, text: str) -> str:
    """The name of `plan`, which `text` describes."""
    _plans.setdefault(text, plan)
    return text


def linear(x: Tensor, tensors: Sequence[Tensor], *, table: Tensor, how: How) -> Tensor:
    """`grouped_products.grouped_linear`; `tensors`: weights, biases, and what is beside the input."""
    # NOTE: where nothing needs a gradient, Dynamo may take the context for an argument (torch 2.13).
    if torch.is_grad_enabled() and any([tensor.requires_grad for tensor in (x, *tensors)]):
        return _GroupedLinear.apply(x, table, *how, *tensors)
    return _called(x, tensors, table, how)[0]


def _called(x: Tensor, tensors: Sequence[Tensor], table: Tensor, how: Sequence[Any]) -> list[Tensor]:
    """(output, buffers that backward needs)."""
    first, end = how[3], how[3] + how[4]
    weights, biases, beside = list(tensors[:first]), list(tensors[first:end]), list(tensors[end:])
    return torch.ops.te_dist.grouped_linear_forward(x, weights, biases, beside, table, PLAIN, *how)


class _GroupedLinear(torch.autograd.Function):
    """As that of `grouped_products`, with what is saved in plain tensors."""

    @staticmethod
    def forward(  # noqa: PLR0913  (what autograd hands over; a tuple of numbers does not survive tracing)
        ctx: Any,
        x: Tensor,
        table: Tensor,
        plan: str,
        front: str,
        saves_original: bool,
        num_weights: int,
        num_biases: int,
        saves_input: bool,
        reads_columns: bool,
        *tensors: Tensor,
    ) -> Tensor:
        how = (plan, front, saves_original, num_weights, num_biases, saves_input, reads_columns)
        out, *buffers = _called(x, tensors, table, how)
        ctx.how, ctx.num_buffers = how, len(buffers)
        weight, bias = tensors[0], tensors[num_weights] if num_biases else None
        ctx.is_one = weight.dim() == 3, bias is not None and bias.dim() == 2  # noqa: PLR2004
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(table, x, *buffers, *tensors[:num_weights], *tensors[num_weights + num_biases :])
        return out

    @staticmethod
    @torch_once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        table, x, *rest = ctx.saved_tensors
        num_weights, num_biases = ctx.how[3:5]
        buffers, weights = rest[: ctx.num_buffers], rest[ctx.num_buffers : ctx.num_buffers + num_weights]
        beside, wants = rest[ctx.num_buffers + num_weights :], ctx.needs_input_grad
        of_weights, rest = wants[_CONSTANTS : _CONSTANTS + num_weights], wants[_CONSTANTS + num_weights :]
        of_biases, of_beside = rest[:num_biases], rest[num_biases:]
        wanted = [wants[0] or any(of_beside), any(of_weights), any(of_biases)]
        found = torch.ops.te_dist.grouped_linear_backward(
            grad, x, buffers, beside, weights, table, PLAIN, *ctx.how, wanted, *ctx.dtypes
        )
        gradients = list(found)
        of_x = [gradients.pop(0) for _ in range(1 + len(beside))] if wanted[0] else [None] * (1 + len(beside))
        of_bias = gradients.pop(0) if wanted[2] else None
        of_weight = gradients.pop(0) if wanted[1] else None
        each = *_each(of_weight, of_weights, ctx.is_one[0]), *_each(of_bias, of_biases, ctx.is_one[1])
        return of_x[0] if wants[0] else None, *[None] * (_CONSTANTS - 1), *each, *of_x[1:]


def _each(gradient: Tensor | None, wanted: Sequence[bool], is_one: bool) -> list[Tensor | None]:
    if gradient is None:
        return [None] * len(wanted)
    parts = [gradient] if is_one else [gradient[number] for number in range(len(wanted))]
    return [part if wants else None for part, wants in zip(parts, wanted, strict=True)]


def _weights(parts: list[Tensor], kind: str) -> list[Tensor]:
    return parts if kind == PLAIN else _kinds[kind].weights(parts)


def _place(x: Tensor, table: Tensor, how: How) -> tuple[Any, ...]:
    """What the buffers of a saved input are known by."""
    return how, tuple(int(extent) for extent in x.shape), x.dtype, table.shape[-1]


def _forward(x: Tensor, weights: list[Tensor], biases: list[Tensor], beside: list[Tensor], *rest: Any) -> list[Tensor]:
    table, kind, how = rest[0], rest[1], How(*rest[2:])
    counts = products.Counts(how.num_weights, how.num_biases, len(beside), how.saves_input)
    whole = _weights(weights, kind)
    if how.reads_columns:
        check_columns(whole[0])  # all are of one kind
    lost_recipes.forward(how.plan, records=how.saves_input or how.reads_columns)
    operands = as_one(whole), as_one(biases), beside, ()
    tensors, saved = products.taped_forward(x, operands, counts, given=how.given(table))
    keep(_saved, _place(x, table, how), saved)
    return list(tensors)


def _fake_forward(x: Tensor, weights: list[Tensor], biases: list[Tensor], beside: list[Tensor], *rest: Any) -> Any:
    table, kind, how = rest[0], rest[1], How(*rest[2:])
    (rows, cols), given = x.shape, how.given(table)
    out = x.new_empty((rows, shape_of(_weights(weights, kind))[1]))
    if not how.saves_input or given.saves_itself(x):
        return [out]
    sample = x.new_empty((SAMPLE, int(cols))), [each.new_empty((SAMPLE, *each.shape[1:])) for each in beside]
    part = given.plan.input.encode_groups(given.source(*sample), table, *products.BOTH).as_matrix(Direction.COLUMNWISE)
    wanted = allocations(part.format, (rows, part.region.shape[1]), table.shape[-1] - 1)
    return [out, *(x.new_empty(wanted[name][0], dtype=wanted[name][1]) for name in part.buffers)]


def _backward(grad: Tensor, x: Tensor, inputs: list[Tensor], beside: list[Tensor], *rest: Any) -> list[Tensor]:
    weights, table, kind, *how, wants, input_dtype, weight_dtype, bias_dtype = rest
    how, known = How(*how), _weights(weights, kind)
    lost_recipes.backward(how.plan)
    saved = _saved[_place(x, table, how)]
    stored = None if saved is None else QuantizedTensor(saved.storage(inputs))
    dtypes = input_dtype, weight_dtype, bias_dtype
    of = products.Backward(
        grad.contiguous(), stored, x, beside, as_one(known), None, tuple(wants), shape_of(known), dtypes
    )
    return [gradient.contiguous() for gradient in products.taped_backward(of, how.given(table))[0]]  # as the fake says


def _fake_backward(grad: Tensor, x: Tensor, inputs: list[Tensor], beside: list[Tensor], *rest: Any) -> list[Tensor]:
    weights, _, kind, *_, wants, input_dtype, weight_dtype, bias_dtype = rest
    shape = shape_of(_weights(weights, kind))
    made = [x.new_empty(x.shape, dtype=input_dtype), *map(torch.empty_like, beside)] if wants[0] else []
    made += [grad.new_empty(shape[:2], dtype=bias_dtype)] if wants[2] else []
    return made + ([grad.new_empty(shape, dtype=weight_dtype)] if wants[1] else [])


def _define() -> None:
    """Registers both ops."""
    tags = (torch.Tag.nondeterministic_seeded,)  # a pass may draw random numbers, so equal calls are not one
    how = "str plan, str front, bool saves_original, int num_weights, int num_biases, bool saves_input"
    how += ", bool reads_columns"
    LIBRARY.define(
        "grouped_linear_forward(Tensor x, Tensor[] weights, Tensor[] biases, Tensor[] beside, Tensor table, str kind, "
        f"{how}) -> Tensor[]",
        tags=tags,
    )
    LIBRARY.define(
        "grouped_linear_backward(Tensor grad, Tensor x, Tensor[] inputs, Tensor[] beside, Tensor[] weights, "
        f"Tensor table, str kind, {how}, bool[] wants, ScalarType input_dtype, ScalarType weight_dtype, "
        "ScalarType? bias_dtype) -> Tensor[]",
        tags=tags,
    )
    for name, function, fake in (
        ("grouped_linear_forward", _forward, _fake_forward),
        ("grouped_linear_backward", _backward, _fake_backward),
    ):
        LIBRARY.impl(name, function, "CPU")
        LIBRARY.impl(name, function, "CUDA")
        torch.library.register_fake(f"te_dist::{name}", fake, lib=LIBRARY)


_define()
_PLACES = {  # of weights and of their kind
    torch.ops.te_dist.grouped_linear_forward.default: (1, 5),
    torch.ops.te_dist.grouped_linear_backward.default: (4, 6),
}


@OF_GROUPS.implements(*_PLACES)
@OPS.implements(*_PLACES)
def _unwrapped(func: Any, args: Any, kwargs: Any) -> Any:
    """The same op on the buffers of quantized weights; see `nn.traced`."""
    (place, kind_place), arguments = _PLACES[func], list(args)
    kinds = {_kind_of(weight) for weight in args[place]}
    if len(kinds) > 1:
        raise ValueError(f"weights of one GroupedLinear have one format, got {len(kinds)}; quantize all by one recipe")
    (kind,) = kinds
    arguments[place] = [buffer for weight in args[place] for buffer in weight.storage.buffers.values()]
    arguments[kind_place] = repr(kind)
    _kinds.setdefault(repr(kind), kind)
    return func(*arguments, **kwargs)


def _kind_of(weight: QuantizedTensor) -> _Kind:
    storage, is_group = weight.storage, isinstance(weight, GroupedTensor)
    num_members = weight.shape[0] if is_group else 1
    return _Kind(storage.format, storage.region, storage.dtype, tuple(storage.buffers), is_group, num_members)
