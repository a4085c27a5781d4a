"""Several optimizers that take turns at the same parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

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
