"""What a recipe answers for linear maps, and whether these can be computed so."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import lcm

import torch

from te_dist.codecs import gemm
from te_dist.formats import Direction
from te_dist.quantizers import Float8CurrentScalingQuantizer, Quantizer
from te_dist.recipe import QuantizerRole, Recipe
from te_dist.scaling.history import DelayedScalingRequest

LINEAR = "linear"  # of the roles that a recipe is asked for
ROWWISE, COLUMNWISE = Direction.ROWWISE, Direction.COLUMNWISE
Answers = dict[str, Quantizer | DelayedScalingRequest]  # by role


@lru_cache(maxsize=1024)
def answers_of(recipe: Recipe, name: str, module_type: str) -> Answers:
    """By role, what `recipe` answers for a linear map of this name."""
    roles = ("input", "weight", "grad_output")
    answers = {kind: recipe.quantizer(QuantizerRole(module_type, kind, name)) for kind in roles}
    if isinstance(answers["weight"], DelayedScalingRequest):
        raise ValueError(f"{name}: weights have no history; answer with a Float8CurrentScalingQuantizer for them")
    return answers


def quantizers_of(recipe: Recipe, name: str, module_type: str) -> dict[str, Quantizer]:
    """By role, a quantizer of the format that the answer leads to."""
    return {
        kind: answer if isinstance(answer, Quantizer) else Float8CurrentScalingQuantizer(answer.fp8)
        for kind, answer in answers_of(recipe, name, module_type).items()
    }


def requests_of(answers: Answers) -> dict[str, DelayedScalingRequest]:
    """Those that ask for a history."""
    return {kind: answer for kind, answer in answers.items() if isinstance(answer, DelayedScalingRequest)}


@lru_cache(maxsize=1024)
def row_multiple(recipe: Recipe, name: str, dtype: torch.dtype, *, target: str) -> int:
    """See `Plan.row_multiple`."""
    quantizers = quantizers_of(recipe, name, LINEAR)
    pair = quantizers["grad_output"], quantizers["input"]
    multiples = [quantizer.multiple(0, dtype) for quantizer in pair]
    formats = [quantizer.declare(dtype) for quantizer in pair]
    if all(COLUMNWISE in format for format in formats):
        a, b = (format[COLUMNWISE].codec for format in formats)
        multiples.append(gemm.find(a, b, target).multiple)
    return lcm(*multiples)


@lru_cache(maxsize=4096)
def check(recipe: Recipe, place: tuple[str, int, int], target: str) -> None:
    """Raises where a map of `place` (name, K, N) cannot be computed by `recipe` on a target."""
    name, in_features, out_features = place
    quantizers = quantizers_of(recipe, name, LINEAR)
    multiple = _gemm_multiple(quantizers, target)
    features = in_features, out_features
    check_features(quantizers, features, multiple, recipe=recipe, label=name or "Linear", where=f"on {target}")


def check_features(
    quantizers: Mapping[str, Quantizer],
    features: tuple[int, int],
    multiple: int,
    *,
    recipe: Recipe,
    label: str,
    where: str,
) -> None:
    """Raises ValueError where a map's features do not fit what quantizes its operands.

    Args:
        quantizers: by role.
        features: (in_features, out_features).
        multiple: what its products take multiples of.
        recipe: that they are of.
        label: what the map is called in the message.
        where: what the recipe takes only such multiples for, or on.
    """
    for what, extent, *needs in (
        ("in_features", features[0], ("input", 1), ("weight", 1)),
        ("out_features", features[1], ("grad_output", 1), ("weight", 0)),
    ):
        wanted = lcm(multiple, *(quantizers[kind].multiple(dim, torch.bfloat16) for kind, dim in needs))
        if extent % wanted:
            raise ValueError(
                f"{label}: {what}={extent} does not fit {type(recipe).__name__}, which takes multiples of {wanted} "
                f"{where}; change {what}, or compute this module outside of the recipe"
            )


def _gemm_multiple(quantizers: Mapping[str, Quantizer], target: str) -> int:
    """What the features have to be multiples of for the three products; raises where there is no function for one."""
    formats = {kind: quantizer.declare(torch.bfloat16) for kind, quantizer in quantizers.items()}
    multiple = 1
    for *kinds, directions in (
        ("input", "weight", (ROWWISE, ROWWISE)),
        ("grad_output", "weight", (ROWWISE, COLUMNWISE)),
        ("grad_output", "input", (COLUMNWISE, COLUMNWISE)),
    ):
        pair = [(formats[kind], direction) for kind, direction in zip(kinds, directions, strict=True)]
        if all(direction in format for format, direction in pair):
            a, b = (format[direction].codec for format, direction in pair)
            multiple = lcm(multiple, gemm.find(a, b, target).multiple)
    return multiple
