"""What changes weights in place behind a load, or behind an offload of state, is kept: as without them, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from te_dist import optim
from te_dist.testing import assert_bitwise
from tests.optim.test_loaded_weights import OPTIMIZERS, every_pair, model, train

MASTER = "master_param"
CHANGES: dict[str, Callable[[Tensor], object]] = {
    "mul_": lambda weight: weight.mul_(0.9),
    "halved": lambda weight: weight.mul_(0.5),
    "fill_": lambda weight: weight.fill_(0.01),
    "clamp_": lambda weight: weight.clamp_(-0.06, 0.06),
    "rows": lambda weight: weight.mul_((torch.arange(weight.shape[0]) % 8 > 0)[:, None]),
    "foreach": lambda weight: torch._foreach_mul_([weight], 0.8),
}
every_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
Trained = tuple[nn.Module, torch.optim.Optimizer]


def load(module: nn.Module, optimizer: torch.optim.Optimizer, order: str) -> None:
    """What they hold, by copies of their states."""
    parts = {"m": module, "o": optimizer}
    states = {key: copy.deepcopy(part.state_dict()) for key, part in parts.items()}
    for key in order:
        parts[key].load_state_dict(states[key])


def into_a_new_one(name: str, make: str, trained: Trained, order: str) -> Trained:
    """Another model and optimizer, with their states."""
    module = model(name, 1)
    parts = {"m": module, "o": OPTIMIZERS[make](module)}
    for key in order:
        parts[key].load_state_dict(copy.deepcopy(trained["mo".index(key)].state_dict()))
    return module, parts["o"]


def replace_state(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = value.clone() if isinstance(value, Tensor) else value


def assert_alike(first: Trained, second: Trained) -> None:
    """Weights and masters."""
    for got, want in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert_bitwise(first[1].state[got][MASTER], second[1].state[want][MASTER], "master")
        assert_bitwise(got, want, "weight")


def twins(name: str, make: str) -> tuple[Trained, Trained]:
    pairs = []
    for _ in range(2):
        module = model(name, 0)
        pairs.append((module, OPTIMIZERS[make](module)))
        train(*pairs[-1], 2)
    return pairs[0], pairs[1]


@torch.no_grad()
def change_all(module: nn.Module, change: Callable[[Tensor], object]) -> None:
    for param in module.parameters():
        change(param)


@every_change
@pytest.mark.parametrize("order", ["o", "mo", "om"])
@every_pair
@pytest.mark.filterwarnings("error")
def test_ops_in_place_behind_a_load_change_masters(name: str, make: str, order: str, change: Callable) -> None:
    loaded, other = twins(name, make)
    load(*loaded, order)
    for each in (loaded, other):
        change_all(each[0], change)
    states = [copy.deepcopy(each[1].state_dict()) for each in (loaded, other)]
    for got, want in zip(*(state["state"].values() for state in states), strict=True):
        assert_bitwise(got[MASTER], want[MASTER], "saved master")
    for each in (loaded, other):
        train(*each, 1)
    assert_alike(loaded, other)


@every_change
@pytest.mark.parametrize("order", ["mo", "om"])
@every_pair
def test_a_run_that_is_resumed_changes_masters(name: str, make: str, order: str, change: Callable) -> None:
    other, _ = twins(name, make)
    resumed = into_a_new_one(name, make, other, order)
    for each in (resumed, other):
        change_all(each[0], change)
        train(*each, 1)
    assert_alike(resumed, other)


@every_change
@every_pair
def test_ops_in_place_beside_state_that_was_replaced_change_masters(name: str, make: str, change: Callable) -> None:
    moved, other = twins(name, make)
    replace_state(moved[1])
    for each in (moved, other):
        change_all(each[0], change)
        train(*each, 1)
    assert_alike(moved, other)


@every_pair
def test_a_load_between_other_weights_and_a_change_does_not_bring_the_master_back(name: str, make: str) -> None:
    (module, optimizer), _ = twins(name, make)
    state = copy.deepcopy(optimizer.state_dict())
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.full(param.shape, 3.0))
        optimizer.load_state_dict(state)
        for param in module.parameters():
            param.mul_(0.5)
    train(module, optimizer, 1)
    for param in module.parameters():
        assert (param.float() - 1.5).abs().max() < 0.1  # noqa: PLR2004


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_rollback_to_before_the_first_step_begins_masters_anew(make: str) -> None:
    pairs = twins("plain", make)
    module = model("plain", 0)
    first, optimizer = (copy.deepcopy(list(module.parameters())), OPTIMIZERS[make](module))
    before = copy.deepcopy(optimizer.state_dict())
    train(module, optimizer, 3)
    with torch.no_grad():
        for param, value in zip(module.parameters(), first, strict=True):
            param.copy_(value)
    optimizer.load_state_dict(before)
    train(module, optimizer, 2)
    assert_alike((module, optimizer), pairs[0])


def test_what_does_not_stand_still_at_a_rate_of_zero_is_written() -> None:
    module = model("block", 0)
    optimizer = optim.MasterWeights(module.parameters(), lambda params: torch.optim.Rprop(params, lr=1e-2))
    train(module, optimizer, 2)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(module, optimizer, 3)
    for param in module.parameters():
        master = optimizer.state[param][MASTER]
        assert (param.dequantize() - master).norm() < 0.05 * master.norm()  # noqa: PLR2004


@every_pair
def test_values_that_are_copied_behind_a_load_are_those_that_an_op_changes(name: str, make: str) -> None:
    """Though they are near what was loaded."""
    (module, optimizer), _ = twins(name, make)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param in module.parameters():
        made = torch.Generator().manual_seed(3)
        values = param.detach() * 1.0
        moved = values + 0.3 * values * torch.rand(values.shape, generator=made).to(values.dtype)
        with torch.no_grad():
            param.copy_(moved)
            written = param.detach() * 1.0
            param.mul_(1.0)
        if name != "nvfp4":  # of which any value may be as far from its own
            assert_bitwise(param.detach() * 1.0, written, "weight")


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_copy_put_back_leaves_a_master_that_is_loaded_alone(make: str) -> None:
    (module, optimizer), (other, its) = twins("block", make)
    saved, state = copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict())
    copies = [param.detach().clone() for param in module.parameters()]
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(1.1)
        optimizer.load_state_dict(state)
        for param, kept in zip(module.parameters(), copies, strict=True):
            param.copy_(kept)
        module.load_state_dict({key: value * 1.0 for key, value in saved.items()})
    for each in ((module, optimizer), (other, its)):
        train(*each, 1)
    assert_alike((module, optimizer), (other, its))


@every_change
@every_pair
def test_state_may_be_loaded_twice(name: str, make: str, change: Callable) -> None:
    loaded, other = twins(name, make)
    states = [copy.deepcopy(loaded[1].state_dict()) for _ in range(2)]
    for state in states:
        loaded[1].load_state_dict(state)
    for each in (loaded, other):
        change_all(each[0], change)
        train(*each, 1)
    assert_alike(loaded, other)


def test_state_of_before_the_first_step_is_loaded_under_inference_mode() -> None:
    module = model("block", 0)
    optimizer = OPTIMIZERS["wrapped"](module)
    before = copy.deepcopy(optimizer.state_dict())
    train(module, optimizer, 1)
    with torch.inference_mode():
        optimizer.load_state_dict(before)
    train(module, optimizer, 1)
