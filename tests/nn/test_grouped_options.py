"""Keywords of GroupedLinear: every combination gives the bits of the plainest one, or is refused when it is made."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import te_dist as te
from te_dist import recipe
from te_dist.quantizers import IdentityQuantizer
from te_dist.recipe import Recipe
from te_dist.testing import assert_bitwise
from tests.nn.recipes import CASES

GROUPS, IN, OUT = 3, 128, 128
SIZES = [9, 0, 20]
RECIPES: dict[str, Recipe | None] = {
    "plain": None,
    "block": recipe.Float8BlockScaling(),
    "delayed": recipe.DelayedScaling(),
    "hybrid": CASES["hybrid"].recipe,
    "identity": recipe.CustomRecipe(lambda role: IdentityQuantizer()),
}
FLAGS = (
    "single_grouped_weight",
    "single_grouped_bias",
    "delay_wgrad_compute",
    "fuse_wgrad_accumulation",
    "save_original_input",
    "return_bias",
)
TWO_FLAGS = list(product((False, True), repeat=2))


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(made_by: Recipe | None, **options: Any) -> te.GroupedLinear:
    """Of the same values every time; its weights quantized by the recipe."""
    with te.quantized_model_init(enabled=made_by is not None, recipe=made_by):
        module = te.GroupedLinear(GROUPS, IN, OUT, **options)
    weights, biases = normal(GROUPS, OUT, IN, seed=3), normal(GROUPS, OUT, seed=4)
    with torch.no_grad():
        for names, values in ((module.weight_names, weights), (module.bias_names, biases)):
            for name, value in zip(names, [values] if len(names) == 1 else values, strict=True):
                getattr(module, name).copy_(value)
    return module


def step(module: te.GroupedLinear, made_by: Recipe | None, **buffers: Tensor) -> dict[str, Tensor]:
    """Output and gradients of a pass, those of all groups as one, however they are kept."""
    x = normal(sum(SIZES), IN).requires_grad_()
    weights = [getattr(module, name) for name in module.weight_names]
    if module.gemm.fuses_wgrad:
        for weight in weights:
            weight.main_grad = torch.zeros(weight.shape)
    with nullcontext() if made_by is None else te.autocast(recipe=made_by):
        out = module(x, SIZES, **buffers)
    if module.return_bias:
        out, bias = out
        biases = bias if module.single_grouped_bias else torch.stack(bias)
        out = out + biases.repeat_interleave(torch.tensor(SIZES), 0)
    out.backward(normal(*out.shape, seed=2))
    if module.delay_wgrad_compute:
        assert all(weight.grad is None for weight in weights)
        module.backward_dw()
    assert not module.gemm.fuses_wgrad or all(weight.grad is None for weight in weights)
    grads = [weight.main_grad if module.gemm.fuses_wgrad else weight.grad for weight in weights]
    biases = [getattr(module, name).grad for name in module.bias_names]
    whole = (
        (grads[0] if len(weights) == 1 else torch.stack(grads)),
        biases[0] if len(biases) == 1 else torch.stack(biases),
    )
    return {"y": out.detach(), "dx": x.grad, "dw": whole[0], "db": whole[1]}


@cache
def plainest(name: str) -> dict[str, Tensor]:
    """What is computed without any flag."""
    return step(make(RECIPES[name]), RECIPES[name])


@pytest.mark.pairwise
@pytest.mark.parametrize("last", TWO_FLAGS)
@pytest.mark.parametrize("middle", TWO_FLAGS)
@pytest.mark.parametrize("first", TWO_FLAGS)
@pytest.mark.parametrize("name", RECIPES)
def test_every_combination_gives_the_same_bits_or_is_refused_when_made(name: str, first, middle, last) -> None:
    made_by = RECIPES[name]
    options = dict(zip(FLAGS, (*first, *middle, *last), strict=True))
    if name == "delayed" and options["save_original_input"]:
        with pytest.raises(ValueError, match="save_original_input quantizes the input once more in backward"):
            make(made_by, **options)
        return
    for key, value in step(make(made_by, **options), made_by).items():
        if key == "y" and options["return_bias"] and name != "plain":
            continue  # the bias is added after rounding
        if key == "db" and options["return_bias"]:
            continue  # torch sums in an order of its own
        assert_bitwise(value, plainest(name)[key], f"{key} with {options}")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(num_gemms=0), "num_gemms is 1 or more, got 0"),
        (dict(bias=False, single_grouped_bias=True), "single_grouped_bias=True with bias=False"),
        (dict(tp_size=2), 'tp_size=2 without a parallel_mode; pass parallel_mode="column" or "row"'),
        (dict(tp_size=2, parallel_mode="column"), "tp_size=2 with a bias, which every rank would add"),
        (dict(tp_size=3, parallel_mode="row", bias=False), "in_features=128 is no multiple of tp_size=3"),
        (dict(parallel_mode="both"), 'parallel_mode is None, "column" or "row"'),
        (dict(ub_overlap_rs=True), "te_dist has no userbuffers"),
    ],
)
def test_keywords_that_do_not_go_together_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        te.GroupedLinear(**dict(num_gemms=2, in_features=IN, out_features=OUT) | options)
