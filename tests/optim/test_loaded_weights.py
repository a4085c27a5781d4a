"""Weights that are loaded are those that training goes on from, whatever the optimizer had for masters before."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import te_dist as te
from te_dist import optim, recipe
from te_dist.catalog import FORMATS
from te_dist.fsdp2 import QuantizedParameter
from te_dist.tensor import quantize
from te_dist.testing import assert_bitwise
from tests.tensor.samples import signed

RECIPES = {
    "plain": None,  # bf16
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "fused": lambda model: optim.FusedAdam(model.parameters(), lr=1e-2),
    "wrapped": lambda model: optim.MasterWeights(model.parameters(), lambda p: torch.optim.AdamW(p, lr=1e-2)),
}
every_pair = pytest.mark.parametrize(
    ("name", "make"), [(name, make) for name in RECIPES for make in OPTIMIZERS], ids=str
)


def model(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with te.quantized_model_init(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
        return nn.Sequential(*(te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16) for _ in range(2)))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        for number, param in enumerate(module.parameters()):
            made = torch.Generator().manual_seed(10 * step + number)
            param.grad = torch.randn(param.shape, generator=made).to(param.dtype)
        optimizer.step()


def values(module: nn.Module) -> Iterator[Tensor]:
    params = (param.detach() for param in module.parameters())
    return (param.dequantize() if isinstance(param, te.QuantizedTensor) else param.clone() for param in params)


def assert_step_without_rate_keeps(module: nn.Module, optimizer: torch.optim.Optimizer, wanted: list[Tensor]) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 1e-30  # a rate of 0 would leave bytes alone, whatever masters are
    train(module, optimizer, 1)
    for got, want in zip(values(module), wanted, strict=True):
        assert (got - want).abs().max() < 1e-28  # noqa: PLR2004  (zeros move by as much as the rate)


@every_pair
def test_weights_of_before_stay_after_the_next_step(name: str, make: str) -> None:
    module = model(name, 0)
    optimizer = OPTIMIZERS[make](module)
    train(module, optimizer, 2)
    snapshot, wanted = copy.deepcopy(module.state_dict()), list(values(module))
    train(module, optimizer, 5)
    module.load_state_dict(snapshot)
    assert_step_without_rate_keeps(module, optimizer, wanted)


@every_pair
def test_weights_loaded_behind_the_optimizer_stay_after_the_next_step(name: str, make: str) -> None:
    trained = model(name, 0)
    train(trained, OPTIMIZERS[make](trained), 2)
    module = model(name, 1)
    optimizer = OPTIMIZERS[make](module)
    module.load_state_dict(trained.state_dict())
    assert_step_without_rate_keeps(module, optimizer, list(values(trained)))


@pytest.mark.parametrize("optimizer_first", [False, True])
@every_pair
def test_masters_are_those_saved_in_whichever_order_states_are_loaded(name: str, make: str, optimizer_first) -> None:
    module = model(name, 0)
    optimizer = OPTIMIZERS[make](module)
    train(module, optimizer, 3)
    states = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    again = model(name, 1)
    other = OPTIMIZERS[make](again)
    train(again, other, 1)
    for part in (1, 0) if optimizer_first else (0, 1):
        (again, other)[part].load_state_dict(states[part])
    train(module, optimizer, 1)
    train(again, other, 1)
    for param, same in zip(module.parameters(), again.parameters(), strict=True):
        master = optimizer.state[param]["master_param"]
        assert_bitwise(other.state[same]["master_param"], master, "a master")


@every_pair
def test_other_weights_loaded_behind_a_loaded_optimizer_count(name: str, make: str) -> None:
    trained, module = model(name, 0), model(name, 1)
    optimizers = [OPTIMIZERS[make](each) for each in (trained, module)]
    train(trained, optimizers[0], 2)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    module.load_state_dict(model(name, 2).state_dict())
    assert_step_without_rate_keeps(module, optimizers[1], list(values(model(name, 2))))


@every_pair
def test_a_loaded_master_is_no_part_of_what_it_was_loaded_from(name: str, make: str) -> None:
    module = model(name, 0)
    optimizer = OPTIMIZERS[make](module)
    train(module, optimizer, 2)
    wanted = list(values(module))
    other = model(name, 1)
    beside = OPTIMIZERS[make](other)
    beside.load_state_dict(optimizer.state_dict())
    train(other, beside, 3)
    assert_step_without_rate_keeps(module, optimizer, wanted)


def of_every_format(seed: int) -> nn.ParameterDict:
    weights = {name: quantize(signed(seed=seed), format).storage for name, format in FORMATS.items()}
    return nn.ParameterDict({name: nn.Parameter(QuantizedParameter(weight)) for name, weight in weights.items()})


def assert_bytes(weights: nn.ParameterDict, want: dict[str, Tensor], when: str) -> None:
    for name, weight in weights.items():
        for field, buffer in weight.storage.buffers.items():
            assert_bitwise(buffer, want[name].storage.buffers[field], f"{field} of {name}, {when}")


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_torchs_helpers_leave_weights_as_they_are(make: str) -> None:
    """They make missing state by a step with gradients and a rate of 0; decoded values have other codes."""
    weights, again = of_every_format(0), of_every_format(1)
    optimizer, other = OPTIMIZERS[make](weights), OPTIMIZERS[make](again)
    before = copy.deepcopy(weights.state_dict())
    get_optimizer_state_dict(weights, optimizer)
    assert_bytes(weights, before, "saved before the first step")
    again.load_state_dict(before)
    set_optimizer_state_dict(again, other, copy.deepcopy(get_optimizer_state_dict(weights, optimizer)))
    assert_bytes(again, before, "loaded before the first step")
    train(again, other, 1)
    assert not torch.equal(again["float8_block_2d"], before["float8_block_2d"])


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_first_step_without_any_gradient_is_warned_of(make: str) -> None:
    """As when the model was sharded behind the optimizer, which then has parameters of nobody."""
    module = model("block", 0)
    optimizer = OPTIMIZERS[make](module)
    with pytest.warns(UserWarning, match=r"no parameter has a gradient.*after it") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    train(module, optimizer, 1)
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
