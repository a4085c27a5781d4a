"""Several optimizers that take turns at the same parameters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import te_dist as te
from te_dist import checkpoints, optim, recipe
from te_dist.optim.masters import MASTER
from te_dist.testing import assert_bitwise

RECIPES = {
    "float8_tensorwise": recipe.Float8CurrentScaling(),
    "float8_block": recipe.Float8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
SHAPE = (128, 256)
TURNS = "aabbabba"

Make = Callable[[list[Tensor]], torch.optim.Optimizer]
MAKES: dict[str, tuple[Make, Make]] = {
    "FusedAdam": (
        lambda params: optim.FusedAdam(params, lr=1e-4, weight_decay=0.01),
        lambda params: torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01),
    ),
    "MasterWeights": (
        lambda params: optim.MasterWeights(params, lambda own: torch.optim.SGD(own, lr=1e-4, momentum=0.9)),
        lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9),
    ),
}


def module(name: str) -> te.Linear:
    with te.quantized_model_init(recipe=RECIPES[name]):
        return te.Linear(SHAPE[1], SHAPE[0], bias=False)


def gradient(step: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))


def turn(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = gradient(step)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("second", MAKES)
@pytest.mark.parametrize("first", MAKES)
@pytest.mark.parametrize("name", RECIPES)
def test_turns_are_those_of_a_plain_parameter(name: str, first: str, second: str) -> None:
    """Steps are far smaller than the distance of two codes: masters take the values of each other over."""
    layer = module(name)
    plain = nn.Parameter(layer.weight.dequantize(dtype=torch.float32))
    optimizers = {key: MAKES[kind][0]([layer.weight]) for key, kind in zip("ab", (first, second), strict=True)}
    others = {key: MAKES[kind][1]([plain]) for key, kind in zip("ab", (first, second), strict=True)}
    for step, key in enumerate(TURNS):
        turn(optimizers[key], step)
        turn(others[key], step)
    master = optimizers[TURNS[-1]].state[layer.weight][MASTER]
    torch.testing.assert_close(master, plain.detach(), rtol=0, atol=1e-6)
    whole = te.tensor.quantize(master, layer.weight.format)
    assert_bitwise(layer.weight.dequantize(), whole.dequantize(), "the weight")


@pytest.mark.parametrize("make", MAKES)
def test_what_an_optimizer_left_behind_is_gone_on_with(make: str) -> None:
    """Of one that is there no longer the codes are left."""
    layer = module("float8_block")
    first, second = (MAKES[make][0]([layer.weight]) for _ in range(2))
    turn(second, 0)
    first.param_groups[0]["lr"] = 0.1
    for step in range(4):
        turn(first, step)
    trained = layer.weight.dequantize()
    del first
    second.param_groups[0]["lr"] = 1e-9
    turn(second, 4)
    torch.testing.assert_close(layer.weight.dequantize(), trained, rtol=0.1, atol=1e-3)


def after_another(
    make: Make, layer: te.Linear, begin: Callable[[list[torch.optim.Optimizer]], torch.optim.Optimizer | None]
) -> list[str]:
    """What the first steps of an optimizer warn of.

    Args:
        begin: is handed the only reference to the optimizer before it, in a list; returns the next one, if it makes it.
    """
    turn(former := make([layer.weight]), 0)
    held = [former]
    del former
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        second = begin(held) or make([layer.weight])
        for step in range(1, 3):
            turn(second, step)
    return [str(warning.message) for warning in found]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("make", MAKES)
def test_a_master_that_begins_as_codes_of_another_is_told_of_once(make: str, name: str) -> None:
    (message,) = after_another(MAKES[make][0], module(name), list.clear)
    assert "shape (128, 256) had a master, which is gone" in message
    assert "state_dict() of the one before" in message


@pytest.mark.parametrize("how", ["kept", "state dict", "helper", "checkpoint"])
@pytest.mark.parametrize("make", MAKES)
def test_nothing_is_said_where_masters_go_on(make: str, how: str, tmp_path) -> None:
    layer = module("float8_block")

    def begin(held: list[torch.optim.Optimizer]) -> torch.optim.Optimizer:
        former = held[0]
        if how == "helper":
            state = copy.deepcopy(get_optimizer_state_dict(layer, former))
        elif how == "state dict":
            state = copy.deepcopy(former.state_dict())
        elif how == "checkpoint":
            checkpoints.save(tmp_path / "step_1", model=layer, optimizer=former)
        if how != "kept":
            held.clear()
        del former
        second = MAKES[make][0]([layer.weight])
        if how == "helper":
            set_optimizer_state_dict(layer, second, state)
        elif how == "state dict":
            second.load_state_dict(state)
        elif how == "checkpoint":
            checkpoints.load(tmp_path / "step_1", model=layer, optimizer=second)
        return second

    assert after_another(MAKES[make][0], layer, begin) == []


@pytest.mark.parametrize("how", ["values", "checkpoint", "another model"])
@pytest.mark.parametrize("make", MAKES)
def test_nothing_is_said_of_weights_that_were_loaded_since(make: str, how: str, tmp_path) -> None:
    layer = module("float8_block")

    def begin(held: list[torch.optim.Optimizer]) -> torch.optim.Optimizer:
        held.clear()
        target = module("float8_block") if how == "another model" else layer
        if how == "checkpoint":
            checkpoints.save(tmp_path / "step_1", model=layer)
            checkpoints.load(tmp_path / "step_1", model=layer)
        elif how == "values":
            layer.load_state_dict({"weight": layer.weight.detach() * 1.0}, strict=False)
        else:
            target.load_state_dict(layer.state_dict())
        return MAKES[make][0]([target.weight])

    assert after_another(MAKES[make][0], layer, begin) == []


@pytest.mark.parametrize("make", MAKES)
def test_a_checkpoint_brings_masters_back_that_had_fallen_behind(make: str, tmp_path) -> None:
    layer = module("float8_block")
    first, second = (MAKES[make][0]([layer.weight]) for _ in range(2))
    turn(first, 0)
    want = first.state[layer.weight][MASTER].clone()
    checkpoints.save(tmp_path / "step_1", model=layer, optimizer=first)
    turn(second, 1)
    checkpoints.load(tmp_path / "step_1", model=layer, optimizer=first)
    first.param_groups[0]["lr"] = 0.0
    turn(first, 2)
    assert_bitwise(first.state[layer.weight][MASTER], want, "the master")
