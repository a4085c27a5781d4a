"""Linear maps of rows in groups, of experts for instance, under torch.compile: two ops that compilers do not look into.

As for other linear maps, see [Note: Compiled linear maps]. What is saved comes back as buffers; quantized weights are
handed over as theirs, those of every group one after the other.
"""

from __future__ import annotations

import math
from ast import literal_eval
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_dist.formats import Direction, Format, Group, Region
from te_dist.grouped import OPS as OF_GROUPS
from te_dist.grouped import GroupedStorage, GroupedTensor
from te_dist.nn import grouped_products as products
from te_dist.nn import lost_recipes
from te_dist.nn.graph_plans import plan_named
from te_dist.nn.group_fronts import GATHERED, SUMMED, SWIGLU, WEIGHTED_SWIGLU, GroupEpilogue, GroupFront
from te_dist.nn.grouped_products import Given, split, where_wanted
from te_dist.nn.grouped_weights import as_one, shape_of
from te_dist.nn.once import torch_once_differentiable
from te_dist.nn.spelled import made_of
from te_dist.nn.traced import Saved, refuse_backward, returned
from te_dist.ops._library import LIBRARY
from te_dist.tensor import OPS, QuantizedStorage, QuantizedTensor
from te_dist.tensor.grouped_rows import allocations

PLAIN = ""  # kind of plain weights, and name of no front
_KNOWN = GATHERED, SWIGLU, WEIGHTED_SWIGLU, WEIGHTED_SWIGLU.handed()
FRONTS: dict[str, GroupFront | None] = {PLAIN: None} | {str(front.name): front for front in _KNOWN}
EPILOGUES: dict[str, GroupEpilogue | None] = {PLAIN: None, str(SUMMED.name): SUMMED}
SAMPLE = 256  # rows, in the place of a number that may be a symbol
_CONSTANTS = 4  # arguments in front of weights
_kinds: dict[str, GroupKind] = {}
_saved: dict[Any, Saved] = {}  # by plan, how, and shape and type of the input


class GroupKind(NamedTuple):
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
    """What of a call is no tensor. In a graph it is a text (`text_of`, `how_of`).

    Names of plan, front, epilogue and of the front that rows are handed to, whether the input is saved as it is, how
    many tensors are weights, biases and beside the input, and whether backward reads what is saved of the input, and
    the columnwise direction of the weights.
    """  # compilers know fields of tuples, but no methods

    plan: str
    front: str
    epilogue: str
    hands_to: str
    saves_original: bool
    counts: tuple[int, int, int]
    saves_input: bool
    reads_columns: bool

    def given(self, table: Tensor) -> Given:
        """As the products take it."""
        around = {"front": FRONTS[self.front], "epilogue": EPILOGUES[self.epilogue], "hands_to": FRONTS[self.hands_to]}
        return Given(table, plan_named(self.plan), saves_original=self.saves_original, **around)


@torch.compiler.assume_constant_result
def text_of(*how: Any) -> str:
    """A `How` of these, as text."""
    return repr(how)


@torch.compiler.assume_constant_result
def how_of(text: str) -> How:
    """That of which `text` is the text."""
    return _parsed(text)


def _finds_gradients(how: How) -> bool:
    """Whether what is in front finds the gradient of the input, which it may read for that."""
    front = FRONTS[how.front]
    return front is not None and front.gradient is not None


@lru_cache(maxsize=4096)
def _parsed(text: str) -> How:
    return How(*literal_eval(text))


def linear(
    x: Tensor, tensors: Sequence[Tensor], *, table: Tensor, how: str, values: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """`grouped_products.grouped_linear`.

    Args:
        tensors: weights, biases, what is beside the input and behind the product.
    """
    # NOTE: where nothing needs a gradient, Dynamo may take the context for an argument (torch 2.13).
    if torch.is_grad_enabled() and any([each is not None and each.requires_grad for each in (x, values, *tensors)]):
        return _GroupedLinear.apply(x, values, table, how, *tensors)
    return _called(x, tensors, table, how)[0]


def _called(x: Tensor, tensors: Sequence[Tensor], table: Tensor, how: str) -> list[Tensor]:
    """(output, buffers that backward needs)."""
    return torch.ops.te_dist.grouped_linear_forward(
        x, *map(list, split(tensors, how_of(how).counts)), table, PLAIN, how
    )


class _GroupedLinear(torch.autograd.Function):
    """As that of `grouped_products`, with what is saved in plain tensors."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor | None, table: Tensor, how: str, *tensors: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        known = how_of(how)
        out, *buffers = _called(x, tensors, table, how)
        weights, biases, beside, behind = split(tensors, known.counts)
        ctx.how, ctx.num_buffers, ctx.shape = how, len(buffers), x.shape
        bias = biases[0] if biases else None
        ctx.is_one = weights[0].dim() == 3, bias is not None and bias.dim() == 2  # noqa: PLR2004
        ctx.dtypes = x.dtype, weights[0].dtype, None if bias is None else bias.dtype
        ctx.has_values = values is not None
        keeps_x = (known.saves_input and len(buffers) == 0) or (_finds_gradients(known) and known.reads_columns)
        rows = out if known.hands_to else None
        ctx.save_for_backward(table, x if keeps_x else None, rows, *buffers, *weights, *beside, *behind)
        if rows is None:
            return out
        ctx.mark_non_differentiable(rows)
        handed = FRONTS[known.hands_to]
        assert handed is not None, "rows are handed to a front"
        return rows, rows.new_empty(handed.source(rows, *behind).shape)

    @staticmethod
    @torch_once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        how, wants = how_of(ctx.how), ctx.needs_input_grad
        table, x, rows, *rest = ctx.saved_tensors
        buffers, rest = rest[: ctx.num_buffers], rest[ctx.num_buffers :]
        weights, _, beside, behind = split(rest, (how.counts[0], 0, how.counts[2]))
        of_weights, of_biases, of_beside, of_behind = split(wants[_CONSTANTS:], how.counts)
        wants_input = wants[0] or wants[1] or any(of_beside)
        wanted = [wants_input, any(of_weights), any(of_biases), any(of_behind)]
        gradients = torch.ops.te_dist.grouped_linear_backward(
            grads[-1], x, rows, buffers, beside, behind, weights, table, PLAIN, ctx.how, wanted, ctx.shape, *ctx.dtypes
        )
        found = iter(gradients)
        num_beside = sum(each.is_floating_point() for each in beside) if _finds_gradients(how) else 0
        of_x = next(found) if wants_input else None
        each_beside = [next(found) for _ in range(num_beside)] if wants_input else []
        of_bias = next(found) if wanted[2] else None
        of_weight = next(found) if wanted[1] else None
        each = *_each(of_weight, of_weights, ctx.is_one[0]), *_each(of_bias, of_biases, ctx.is_one[1])
        of_input = (None, of_x) if ctx.has_values else (of_x, None)
        around = *where_wanted(each_beside, of_beside), *where_wanted(list(found), of_behind)
        return *of_input, None, None, *each, *around


def _each(gradient: Tensor | None, wanted: Sequence[bool], is_one: bool) -> list[Tensor | None]:
    if gradient is None:
        return [None] * len(wanted)
    parts = [gradient] if is_one else [gradient[number] for number in range(len(wanted))]
    return [part if wants else None for part, wants in zip(parts, wanted, strict=True)]


def _weights(parts: list[Tensor], kind: str) -> list[Tensor]:
    if kind == PLAIN:
        return parts
    known: GroupKind = _kinds.get(kind) or made_of(kind, GroupKind)
    return known.weights(parts)


def _forward(x: Tensor, weights: list[Tensor], biases: list[Tensor], beside: list[Tensor], *rest: Any) -> list[Tensor]:
    behind, table, kind, text = rest
    how, whole = how_of(text), _weights(weights, kind)
    lost_recipes.forward(how.plan, records=how.saves_input or how.reads_columns)
    counts = products.Counts(*how.counts, how.saves_input)
    operands = as_one(whole), as_one(biases or ()), beside or (), behind or ()  # AOTInductor has None for none
    tensors, saved = products.taped_forward(x, operands, counts, given=how.given(table))
    return returned(tensors, saved, place=_place(x.shape, x.dtype, table, how), saved=_saved)


def _place(shape: Sequence[int], dtype: torch.dtype, table: Tensor, how: How) -> tuple[Any, ...]:
    """What the buffers of a saved input are known by."""
    return how, tuple(map(int, shape)), dtype, table.shape[-1]


def _fake_forward(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], beside: list[Tensor], *rest: Any
) -> list[Tensor]:
    behind, table, kind, text = rest
    how = how_of(text)
    given = how.given(table)
    rows, cols = given.source(x, beside).shape
    out = given.made_of(x.new_empty((rows, shape_of(_weights(weights, kind))[1])), behind)
    if not how.saves_input or given.saves_itself(x):
        return [out]
    sample = x.new_empty((SAMPLE, int(x.shape[1]))), [each.new_empty((SAMPLE, *each.shape[1:])) for each in beside]
    part = given.plan.input.encode_groups(given.source(*sample), table, *products.BOTH).as_matrix(Direction.COLUMNWISE)
    wanted = allocations(part.format, (rows, int(cols)), table.shape[-1] - 1)
    return [out, *(x.new_empty(math.prod(wanted[name][0]), dtype=wanted[name][1]) for name in part.buffers)]


def _backward(grad: Tensor, x: Tensor | None, rows: Tensor | None, *rest: Any) -> list[Tensor]:
    inputs, beside, behind, weights, table, kind, text, wants, shape, *dtypes = rest
    how, known = how_of(text), _weights(weights, kind)
    given = how.given(table)
    lost_recipes.backward(how.plan)
    stored = None
    if inputs:
        stored = QuantizedTensor(_saved[_place(shape, dtypes[0], table, how)].storage(inputs))
    given_to = grad.contiguous(), stored, x, beside, as_one(known), None
    asked = tuple(wants[:3]), shape_of(known), tuple(dtypes)
    of, of_behind = products.Backward(*given_to, *asked, rows, behind), ()
    if given.hands_to is not None:
        of, of_behind = products.read_handed(of, given, wants[3])
    found = *products.taped_backward(of, given)[0], *of_behind
    return [gradient.contiguous() for gradient in found]  # as the fake says


def _fake_backward(grad: Tensor, x: Tensor | None, rows: Tensor | None, *rest: Any) -> list[Tensor]:
    _, beside, behind, weights, table, kind, text, wants, shape, *dtypes = rest
    how, of_weights = how_of(text), shape_of(_weights(weights, kind))
    given, read = how.given(table), grad.new_empty(shape, dtype=dtypes[0])
    found = read if _finds_gradients(how) else grad.new_empty(given.source(read, beside).shape, dtype=dtypes[0])
    made = [found] if wants[0] else []
    if wants[0] and _finds_gradients(how):
        made += [torch.empty_like(each) for each in beside if each.is_floating_point()]
    made += [grad.new_empty(of_weights[:2], dtype=dtypes[2])] if wants[2] else []
    made += [grad.new_empty(of_weights, dtype=dtypes[1])] if wants[1] else []
    return made + ([torch.empty_like(each) for each in behind] if wants[3] else [])


def _define() -> None:
    """Registers both ops."""
    tags = (torch.Tag.nondeterministic_seeded,)  # a pass may draw random numbers, so equal calls are not one
    LIBRARY.define(
        "grouped_linear_forward(Tensor x, Tensor[] weights, Tensor[]? biases, Tensor[]? beside, Tensor[]? behind, "
        "Tensor table, str kind, str how) -> Tensor[]",
        tags=tags,
    )
    LIBRARY.define(
        "grouped_linear_backward(Tensor grad, Tensor? x, Tensor? rows, Tensor[] inputs, Tensor[] beside, "
        "Tensor[] behind, Tensor[] weights, Tensor table, str kind, str how, bool[] wants, SymInt[] shape, "
        "ScalarType input_dtype, ScalarType weight_dtype, ScalarType? bias_dtype) -> Tensor[]",
        tags=tags,
    )
    for name, function, fake in (
        ("grouped_linear_forward", _forward, _fake_forward),
        ("grouped_linear_backward", _backward, _fake_backward),
    ):
        LIBRARY.impl(name, function, "CPU")
        LIBRARY.impl(name, function, "CUDA")
        torch.library.register_fake(f"te_dist::{name}", fake, lib=LIBRARY)
    refuse_backward("grouped_linear_forward")


_define()
_PLACES = {  # of weights and of their kind
    torch.ops.te_dist.grouped_linear_forward.default: (1, 6),
    torch.ops.te_dist.grouped_linear_backward.default: (6, 8),
}


@OF_GROUPS.implements(*_PLACES)
@OPS.implements(*_PLACES)
def _unwrapped(func: Any, args: Any, kwargs: Any) -> Any:
    """The same op on the buffers of quantized weights; see `nn.traced`."""
    (place, kind_place), arguments = _PLACES[func], list(args)
    first, weights = args[place][0].storage.buffers, args[place]
    names = tuple(name for name in first if all(name in weight.storage.buffers for weight in weights))
    kinds = {_kind_of(weight, names) for weight in weights}
    if len(kinds) > 1:
        raise ValueError(f"weights of one GroupedLinear have one format, got {len(kinds)}; quantize all by one recipe")
    (kind,) = kinds
    arguments[place] = [weight.storage.buffers[name] for weight in weights for name in names]
    arguments[kind_place] = repr(kind)
    _kinds.setdefault(repr(kind), kind)
    return func(*arguments, **kwargs)


def _kind_of(weight: QuantizedTensor, names: tuple[str, ...]) -> GroupKind:
    storage, is_group = weight.storage, isinstance(weight, GroupedTensor)
    num_members = weight.shape[0] if is_group else 1
    return GroupKind(storage.format, storage.region, storage.dtype, names, is_group, num_members)
