"""Training that forgot its `autocast` is told so."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import pytest
import torch

import te_dist as te
from te_dist.nn import forgotten


def layer_and_pass(made: te.recipe.Recipe, grouped: bool) -> tuple[torch.nn.Module, Callable[[], object]]:
    """A linear map with a weight quantized by a recipe, and a forward pass of it."""
    with te.quantized_model_init(recipe=made):
        layer = te.GroupedLinear(1, 128, 128, bias=False) if grouped else te.Linear(128, 128, bias=False)
    x = torch.randn(128, 128)
    return layer, functools.partial(layer, x, [128]) if grouped else functools.partial(layer, x)


def test_a_block_in_which_nothing_is_quantized_warns() -> None:
    recipe = te.recipe.Float8BlockScaling()
    told = pytest.warns(UserWarning, match="te_dist made no weights.*te_dist.convert")
    with told, te.quantized_model_init(recipe=recipe):
        model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with te.quantized_model_init(recipe=recipe):
            te.Linear(128, 128)
        with te.quantized_model_init(recipe=recipe):
            te.convert(model, {"*": recipe})
        with te.quantized_model_init(enabled=False):
            pass
        with pytest.raises(KeyError), te.quantized_model_init(recipe=recipe):
            raise KeyError


def test_plain_modules_that_convert_leaves_are_told_of() -> None:
    recipe = te.recipe.Float8BlockScaling()
    model = torch.nn.ModuleDict({name: torch.nn.Linear(128, 128) for name in "ab"} | {"c": te.Linear(128, 128)})
    with pytest.warns(UserWarning, match=r"as they are: \['c'\] were made with plain weights"):
        te.convert(model, {"a": None, "*": recipe})
    model["d"] = torch.nn.Linear(128, 128)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        te.convert(model, {"d": recipe})


@pytest.mark.parametrize("grouped", [False, True])
def test_training_quantized_weights_outside_of_autocast_warns_once(monkeypatch, grouped: bool) -> None:
    monkeypatch.setattr(forgotten, "_has_warned", False)
    layer, run = layer_and_pass(te.recipe.Float8BlockScaling(), grouped)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with te.autocast(enabled=False):
            run()
        with torch.no_grad():
            run()
        layer.requires_grad_(False)
        run()
        layer.requires_grad_(True)
        with pytest.raises(UserWarning, match="trained outside of te_dist.autocast.*enabled=False"):
            run()
        run()


@pytest.mark.parametrize("grouped", [False, True])
def test_plain_weights_in_the_place_of_quantized_ones_warn_once(monkeypatch, grouped: bool) -> None:
    monkeypatch.setattr(forgotten, "_has_warned_of_plain", False)
    layer, run = layer_and_pass(te.recipe.Float8BlockScaling(), grouped)
    with warnings.catch_warnings(), te.autocast(recipe=te.recipe.Float8BlockScaling()):
        warnings.simplefilter("error")
        run()
        name, weight = next(iter(layer.named_parameters()))
        layer.register_parameter(name, torch.nn.Parameter(weight.dequantize().detach()))
        with pytest.raises(UserWarning, match="made quantized, and another one that is plain.*unless this is meant"):
            run()
        run()


@pytest.mark.parametrize("grouped", [False, True])
def test_weights_of_another_recipe_warn_once(monkeypatch, grouped: bool) -> None:
    monkeypatch.setattr(forgotten, "_has_warned_of_another", False)
    _, run = layer_and_pass(te.recipe.MXFP8BlockScaling(), grouped)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
            run()
        words = "weight is mxfp8_1d, and NVFP4BlockScaling of te_dist.autocast makes weights of nvfp4_2d.*unless"
        with te.autocast(recipe=te.recipe.NVFP4BlockScaling()):
            with pytest.raises(UserWarning, match=words):
                run()
            run()


@pytest.mark.parametrize(
    ("made", "met"),
    [
        (te.recipe.Float8CurrentScaling(), te.recipe.DelayedScaling()),
        (te.recipe.Float8BlockScaling(), te.recipe.Float8BlockScaling(amax_epsilon=1e-8)),
    ],
)
def test_weights_that_two_recipes_store_alike_do_not_warn(monkeypatch, made, met) -> None:
    monkeypatch.setattr(forgotten, "_has_warned_of_another", False)
    with te.quantized_model_init(recipe=made):
        layer = te.Linear(128, 128, bias=False)
    plain = te.Linear(128, 128, bias=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with te.autocast(recipe=met):
            layer(torch.randn(16, 128))
            plain(torch.randn(16, 128))
