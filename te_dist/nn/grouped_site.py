"""Where a linear map of rows in groups meets the recipe."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Sequence
from functools import cache, lru_cache
from math import lcm
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from te_dist import _torch_private, catalog
from te_dist.codecs import grouped_gemm
from te_dist.context import current_autocast
from te_dist.formats import Direction
from te_dist.fsdp2.check import check_gathered
from te_dist.kernels.tape import Tapes
from te_dist.nn import forgotten, grouped_traced, lost_recipes
from te_dist.nn.answers import Answers, answers_of, check_features, quantizers_of
from te_dist.nn.graph_plans import MAKERS, name_for_graphs, reads_gradients_once
from te_dist.nn.grouped_cache import WeightCache
from te_dist.nn.grouped_products import Around, Given, differentiable, grouped_linear, reads_weights
from te_dist.nn.grouped_weights import OneBuffer
from te_dist.nn.plan import MAX_SHARED, Plan, plan_by
from te_dist.nn.site import LinearSite, check_reduced
from te_dist.nn.traced import check_differentiable, holds
from te_dist.quantizers import HybridQuantizer, IdentityQuantizer, Quantizer
from te_dist.recipe import Recipe
from te_dist.scaling.history import DelayedScalingRequest
from te_dist.tensor import QuantizedTensor

ROWWISE, COLUMNWISE = Direction.ROWWISE, Direction.COLUMNWISE
PLAIN = Plan(IdentityQuantizer(), IdentityQuantizer(), IdentityQuantizer())  # until a site knows better
BY_HAND = ("delay_wgrad_compute", "fuse_wgrad_accumulation")  # options by which backward returns no gradients
NO_HISTORIES = (
    "experts of several ranks have none, since checkpoints hold those of one rank and a reduction mixes those of "
    "different experts; take Float8CurrentScaling or a recipe with a scale for each block"
)


class GroupedSite(LinearSite):
    """One linear map for each group of rows; as `LinearSite`, with a scale for every group where a tensor has one.

    Attributes:
        num_groups: G.
        num_ranks: of which each has groups of its own.
        saves_original: see `grouped_products.Given`.
        one_buffer: what knows whether quantized weights of each group lie in one buffer.
        kept: what is kept of plain weights between calls.
    """

    module_type: ClassVar[str] = "grouped_linear"

    num_ranks: int = 1
    saves_original: bool = False
    one_buffer: OneBuffer | None = None

    def __init__(self, num_groups: int, in_features: int, out_features: int, *, name: str) -> None:
        super().__init__(in_features, out_features, name=name)
        self.num_groups = num_groups
        self.place = self.graph_place = repr((name, in_features, out_features, num_groups))
        self.kept = WeightCache(self._label)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        *,
        given: Given,
        **around: Unpack[Around],
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """(T, N) in the dtype of `x`, see `grouped_products.grouped_linear`; `given.plan` is replaced by the recipe's.

        Inside of `autocast` all three products are computed by its recipe; a quantized weight is used in its own
        format. Outside, quantized weights stand for their values, which are written for each product.

        Raises:
            ValueError: weights of different formats, or a quantized input outside of `autocast`; the recipe cannot
                compute this map.
            NotImplementedError: there is no product in groups of the encodings that meet.
        """
        if self.made_quantized and not isinstance(weights[0], QuantizedTensor):
            check_gathered(weights[0])
            forgotten.warn_of_plain(self)
        if torch.compiler.is_compiling():
            return self._traced(x, weights, given=given, **around)
        return self._eager(x, weights, given=given, **around)

    def _traced(self, x: Tensor, weights: Sequence[Tensor], *, given: Given, **around: Unpack[Around]) -> Any:
        """As `_eager`, see [Note: Compiled linear maps]."""
        state, trains = current_autocast(), self.training or torch.is_grad_enabled()
        if not state.name and trains:
            lost_recipes.refuse_again(self.graph_place)
        biases, beside, behind = (around.get(each, ()) for each in ("biases", "beside", "behind"))
        values, differentiates = around.get("values"), torch.is_grad_enabled()
        saves = differentiates and any([weight.requires_grad for weight in weights])
        reads = differentiates and any([each is not None and each.requires_grad for each in (x, values, *beside)])
        asked = given.out, given.dgrad_out, given.later, given.is_first, given.skip
        plan = None
        if all([value is None for value in asked]):
            plan = self.plan_in_graph(x, *weights, multiplies=reads)
        if plan is None:
            return self._untraced(x, weights, given=given, **around)
        hands = given.hands_to is not None and differentiates and reads_gradients_once(plan)
        tensors = [*weights, *biases, *beside, *(behind if hands or given.epilogue is not None else ())]
        names = [
            grouped_traced.PLAIN if each is None else str(each.name)
            for each in (given.front, given.epilogue, given.hands_to if hands else None)
        ]
        counts = len(weights), len(biases), len(beside)
        how = grouped_traced.text_of(plan, *names, given.saves_original, counts, saves, reads)
        out = grouped_traced.linear(x, tensors, table=given.table, how=how, values=values)
        return (out, None) if given.hands_to is not None and not hands else out

    def plan_in_graph(self, x: Tensor, *weights: Tensor, multiplies: bool) -> str | None:
        """Name of the plan by which a graph computes this map of `x`; None where the map stays outside of graphs.

        `multiplies`: whether the gradient of the input is wanted, or of what is beside it.
        """
        if isinstance(x, QuantizedTensor) or self.fuses_wgrad:
            return None
        if not all([holds(weight, multiplies=multiplies) for weight in weights]):
            return None
        check_differentiable("a map of rows in groups", trains=self.training)
        state, trains = current_autocast(), self.training or torch.is_grad_enabled()
        place = self.graph_place if state.is_uniform else self.place
        places = place, self.graph_place
        device = weights[0].device
        return name_for_graphs(self.module_type, state.name, places, dtype=x.dtype, device=device, trains=trains)

    @torch.compiler.disable(
        reason="this linear map keeps state in Python: delayed scaling, main or delayed gradients, weights kept over "
        "microbatches, buffers of the caller or a quantized input; or its weights lack what backward multiplies (FSDP2 "
        "gathers a direction for each pass). Leave these out, or fullgraph=True"
    )
    def _untraced(self, x: Tensor, weights: Sequence[Tensor], *, given: Given, **around: Unpack[Around]) -> Any:
        out = self._eager(x, weights, given=given, **around)
        lost_recipes.outside_of_graph(self.graph_place, out, trains=self.training)
        return out

    def _eager(self, x: Tensor, weights: Sequence[Tensor], *, given: Given, **around: Unpack[Around]) -> Any:
        one = self.one_buffer
        if one is None or not one.holds(weights):
            one = None
            self._check_weights(weights)
        self._check_options(weights, given)
        first = weights[0]
        trained = first if first.requires_grad else next((each for each in weights if each.requires_grad), first)
        values = around.get("values")
        plan = self.plan(x if values is None else values, trained)
        given = given._replace(plan=plan, cached=None if one is None else one.storage)
        if given.hands_to is not None and (plan is None or not plan.reads_gradients_once):
            around = {**around, "behind": ()}
            return self._by_plan(x, weights, given=given._replace(hands_to=None), **around), None
        return self._by_plan(x, weights, given=given, **around)

    def _by_plan(self, x: Tensor, weights: Sequence[Tensor], *, given: Given, **around: Unpack[Around]) -> Any:
        """By `given.plan`; None outside of `autocast`."""
        first, plan = weights[0], given.plan
        if plan is None:
            return grouped_linear(x, weights, given=self._outside(x, weights, given=given), **around)
        if given.skip is not None:
            return self._by_flag(x, weights, given.skip, given=given, **around)
        is_one = given.cached is not None
        if given.is_first is not None and not isinstance(first, QuantizedTensor):
            given = given._replace(cached=self.kept.by_host(weights, plan.weight, is_first=given.is_first))
        try:
            out = grouped_linear(x, weights, given=given, **around)
        except NotImplementedError as error:
            if isinstance(first, QuantizedTensor) and first.format != plan.weight.declare(first.dtype):
                raise self._of_another_recipe(first, error) from error
            raise
        if is_one and reads_weights(x, **around):
            OneBuffer.guard(differentiable(out), weights, self._label)
        return out

    def _of_another_recipe(self, weight: QuantizedTensor, error: NotImplementedError) -> NotImplementedError:
        """Where no product takes weights that this recipe would not have made."""
        return NotImplementedError(
            f"{self._label}: the weights are {catalog.name_of(weight.format)}, and autocast is by "
            f"{type(current_autocast().recipe).__name__}; pass it the recipe that made the weights. There are {error}"
        )

    def _by_flag(
        self, x: Tensor, weights: Sequence[Tensor], skip: Tensor, *, given: Given, **around: Unpack[Around]
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As `_eager`, see [Note: Weights kept by a flag]."""
        if isinstance(weights[0], QuantizedTensor) or given.is_first is not None:
            why = "the weights are quantized already" if given.is_first is None else "is_first_microbatch says it too"
            raise ValueError(f"{self._label}: skip_weight_quantization: {why}; leave skip_weight_quantization out")
        flagged = self.kept.by_flag(weights, given.plan.weight, skip)
        out = grouped_linear(x, weights, given=given._replace(cached=flagged.stack), **around)
        flagged.guard(differentiable(out))
        return out

    def prepare(self, recipe: Recipe, device: torch.device) -> Answers:
        self.check_ranks(recipe)
        return super().prepare(recipe, device)

    def check_ranks(self, recipe: Recipe) -> None:
        """Raises ValueError where groups of several ranks would keep histories, on every rank alike."""
        if self.num_ranks == 1:
            return
        answers = answers_of(recipe, self.name, self.module_type)
        delayed = [kind for kind, answer in answers.items() if isinstance(answer, DelayedScalingRequest)]
        if delayed:
            raise ValueError(
                f"{self._label}: {type(recipe).__name__} asks for histories of {', '.join(delayed)}; {NO_HISTORIES}"
            )

    def check(self, recipe: Recipe, target: str) -> None:
        _check(recipe, (self.name, self.in_features, self.out_features), target)
        answer = answers_of(recipe, self.name, self.module_type)["input"]
        if self.saves_original and isinstance(answer, DelayedScalingRequest):
            raise ValueError(
                f"{self._label}: save_original_input quantizes the input once more in backward, by when delayed "
                "scaling may have moved its scale; leave save_original_input out, or take another recipe"
            )

    def row_multiple(self, recipe: Recipe, dtype: torch.dtype, target: str) -> int:
        return 1  # quantizers pad groups, not rows

    @property
    def _label(self) -> str:
        return self.name or "GroupedLinear"

    def _outside(self, x: Tensor, weights: Sequence[Tensor], *, given: Given) -> Given:
        """What holds outside of `autocast`: values in the type of the input, products in it."""
        if isinstance(x, QuantizedTensor):
            raise ValueError(
                f"{self._label}: the input is quantized, and there is no product in groups of it with plain weights; "
                "call this inside of te_dist.autocast(recipe=...), or dequantize it"
            )
        return given._replace(plan=_plain_plan(x.dtype, fuses_wgrad=self.fuses_wgrad), cached=None)

    def _check_options(self, weights: Sequence[Tensor], given: Given) -> None:
        """What FSDP2 gathers sees its gradient in backward only, and is written anew without a trace."""
        if given.later is None and given.is_first is None and given.skip is None and not self.fuses_wgrad:
            return
        asked = (
            ("delay_wgrad_compute", given.later is not None),
            ("fuse_wgrad_accumulation", self.fuses_wgrad),
            ("is_first_microbatch", given.is_first is not None and not isinstance(weights[0], QuantizedTensor)),
            ("skip_weight_quantization", given.skip is not None),
        )
        found = [name for name, value in asked if value]
        if found and _torch_private.is_any_gathered(weights):
            raise ValueError(
                f"{self._label}: the weights are gathered by FSDP2, under which {' and '.join(found)} would lose "
                "gradients or updates; leave it out"
            )
        if given.later is not None or self.fuses_wgrad:
            check_reduced(" and ".join(name for name in found if name in BY_HAND), self._label)

    def _check_weights(self, weights: Sequence[Tensor]) -> None:
        """All are plain, or all in one format."""
        if len(weights) == 1 or weights[0].is_meta:
            return
        formats = [weight.storage.format if isinstance(weight, QuantizedTensor) else None for weight in weights]
        if any(format is not formats[0] and format != formats[0] for format in formats):
            found = "; ".join(sorted({"plain" if format is None else catalog.name_of(format) for format in formats}))
            raise ValueError(
                f"{self._label}: weights of one GroupedLinear have one format, or are all plain, got {found}; quantize "
                "all of them by one recipe (hybrid and plain quantizers do not mix)"
            )


def _plan_in_graph(recipe: Recipe | None, place: str, dtype: torch.dtype, target: str) -> Plan | None:
    """See `graph_plans.MAKERS`."""
    if recipe is None:
        return _plain_plan(dtype, fuses_wgrad=False)
    name, *features, _ = literal_eval(place)
    answers = answers_of(recipe, name, GroupedSite.module_type)
    _check(recipe, (name, *features), target)
    if any(not isinstance(answer, Quantizer) for answer in answers.values()):
        return None
    return plan_by(recipe, GroupedSite.module_type, answers, features=features)


MAKERS[GroupedSite.module_type] = _plan_in_graph


@cache
def _plain_plan(dtype: torch.dtype, *, fuses_wgrad: bool) -> Plan:
    """Of all maps outside of `autocast`."""
    inputs, weights, grads = (IdentityQuantizer(dtype=dtype) for _ in range(3))
    return Plan(inputs, weights, grads, fuses_wgrad=fuses_wgrad, tapes=Tapes(MAX_SHARED))


@lru_cache(maxsize=4096)
def _check(recipe: Recipe, place: tuple[str, int, int], target: str) -> None:
    """Raises where a map of `place` (name, K, N) cannot be computed by `recipe` on a target, see `target_of`."""
    name, in_features, out_features = place
    quantizers = quantizers_of(recipe, name, GroupedSite.module_type)
    for quantizer in quantizers.values():
        _check_columnwise_source(quantizer)
    multiple = _multiple_of(quantizers, target)
    features, label = (in_features, out_features), name or "GroupedLinear"
    check_features(quantizers, features, multiple, recipe=recipe, label=label, where="for products in groups")


def _multiple_of(quantizers: dict[str, Quantizer], target: str) -> int:
    """What the features have to be multiples of; raises where there is no function for one of the products."""
    formats = {kind: quantizer.declare(torch.bfloat16) for kind, quantizer in quantizers.items()}
    multiple = 1
    for find, *kinds, directions in (
        (grouped_gemm.find, "input", "weight", (ROWWISE, ROWWISE)),
        (grouped_gemm.find, "grad_output", "weight", (ROWWISE, COLUMNWISE)),
        (grouped_gemm.find_sums, "grad_output", "input", (COLUMNWISE, COLUMNWISE)),
    ):
        for kind, direction in zip(kinds, directions, strict=True):
            if direction not in formats[kind]:
                raise NotImplementedError(
                    f"{quantizers[kind]} has no {direction.value} direction, which the products of {kind} in groups "
                    "need; choose another quantizer for it"
                )
        a, b = (formats[kind][direction] for kind, direction in zip(kinds, directions, strict=True))
        multiple = lcm(multiple, find(a, b, target).multiple)
    return multiple


def _check_columnwise_source(quantizer: Quantizer) -> None:
    if not isinstance(quantizer, HybridQuantizer) or quantizer.columnwise_source == "original":
        return
    fields = quantizer.rowwise_quantizer.declare(torch.bfloat16)[ROWWISE].fields
    if any(field.grain[0] != 1 for field in fields):
        raise NotImplementedError(
            f'columnwise_source="rowwise_dequantized" in groups needs rows with scales of their own, got {quantizer}; '
            'take "original", or another format rowwise'
        )
