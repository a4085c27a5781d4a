"""Weights that are changed between steps and put back: training goes on as if nothing had happened."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from te_dist.tensor import writes
from te_dist.testing import assert_bitwise
from tests.optim.test_loaded_weights import OPTIMIZERS, assert_step_without_rate_keeps, model, train

Restore = Callable[[Tensor, Tensor], object]
CHANGES = {
    "mul_": lambda weight: weight.mul_(2.0),
    "add_": lambda weight: weight.add_(torch.ones_like(weight)),
    "normal_": nn.init.normal_,
    "twice": lambda weight: weight.mul_(2.0).sub_(0.25),
    "foreach": lambda weight: torch._foreach_mul_([weight], 3.0),
}
RESTORES: dict[str, Restore] = {
    "copy_": lambda weight, kept: weight.copy_(kept),
    "data": lambda weight, kept: setattr(weight, "data", kept),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


class Twins:
    """Two trainings alike, of which one is disturbed."""

    def __init__(self, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        self.pairs = [(module, make(module)) for module in (model("block", 0), model("block", 0))]
        self.train(2)
        self.disturbed = self.pairs[0][0]

    def train(self, steps: int) -> None:
        for module, optimizer in self.pairs:
            train(module, optimizer, steps)

    def assert_alike(self) -> None:
        """After one more step, codes and masters."""
        self.train(1)
        (module, optimizer), (other, its_optimizer) = self.pairs
        for got, want in zip(module.parameters(), other.parameters(), strict=True):
            masters = (
                state[param]["master_param"] for state, param in ((optimizer.state, got), (its_optimizer.state, want))
            )
            assert_bitwise(*masters, "master")
            assert_bitwise(got, want, "weight")


@every_optimizer
@pytest.mark.parametrize("restore", RESTORES.values(), ids=RESTORES)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.filterwarnings("error")
def test_a_copy_that_is_put_back_has_the_master_it_was_copied_with(make, change, restore) -> None:
    twins = Twins(make)
    for _ in range(2):
        kept = [weight.detach().clone() for weight in twins.disturbed.parameters()]
        with torch.no_grad():
            for weight, its in zip(twins.disturbed.parameters(), kept, strict=True):
                change(weight)
                restore(weight, its)
    twins.assert_alike()


@every_optimizer
def test_a_state_dictionary_that_was_copied_is_loaded_with_its_masters(make) -> None:
    twins = Twins(make)
    kept = copy.deepcopy(twins.disturbed.state_dict())
    with torch.no_grad():
        for weight in twins.disturbed.parameters():
            weight.zero_()
    twins.disturbed.load_state_dict(kept)
    twins.assert_alike()


@every_optimizer
def test_what_was_copied_before_a_step_has_its_master_where_that_was_changed_in_place(make) -> None:
    twins = Twins(make)
    kept = [weight.detach().clone() for weight in twins.disturbed.parameters()]
    before = copy.deepcopy(twins.pairs[1])
    with torch.no_grad():
        for weight in twins.disturbed.parameters():
            weight.add_(0.5)
    train(*twins.pairs[0], 1)
    with torch.no_grad():
        for weight, its in zip(twins.disturbed.parameters(), kept, strict=True):
            weight.copy_(its)
    optimizer = twins.pairs[0][1]
    for group in optimizer.param_groups:
        group["lr"] = 1e-30
    train(*twins.pairs[0], 1)
    for weight, its in zip(twins.disturbed.parameters(), before[0].parameters(), strict=True):
        assert_bitwise(optimizer.state[weight]["master_param"], before[1].state[its]["master_param"], "master")


@every_optimizer
def test_weights_that_an_average_is_assigned_to_are_put_back_by_what_they_were(make) -> None:
    """The usual class: `backup = param.data`, then an average of plain values, then the backup."""
    twins = Twins(make)
    backup = [weight.data for weight in twins.disturbed.parameters()]
    for weight, its in zip(twins.disturbed.parameters(), backup, strict=True):
        weight.data = its.dequantize() * 3.0
        weight.data = its
    twins.assert_alike()


@every_optimizer
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
def test_a_weight_that_was_swapped_out_is_still_that_of_its_master(make, inference: bool) -> None:
    """So that it follows what is done to the weight once that is back."""
    twins = Twins(make)
    for weight in twins.disturbed.parameters():
        kept = weight.data
        with torch.inference_mode(inference):
            weight.data = torch.ones(weight.shape)
        weight.data = kept
    for module, _ in twins.pairs:
        with torch.no_grad():
            for weight in module.parameters():
                weight.mul_(0.999)
    twins.assert_alike()


@every_optimizer
@pytest.mark.parametrize("swapped", [torch.ones_like, torch.clone], ids=["values", "a copy"])
def test_a_weight_of_before_steps_has_no_master_any_longer(make, swapped) -> None:
    """Neither once it is back, nor for what is done to it meanwhile."""
    twins = Twins(make)
    module, optimizer = twins.pairs[0]
    weight = next(module.parameters())
    kept, before = weight.data, weight.detach().dequantize()
    weight.data = swapped(weight.detach())
    train(module, optimizer, 3)
    after = optimizer.state[weight]["master_param"].clone()
    with torch.no_grad():
        kept.clamp_(-100.0, 100.0)
    assert_bitwise(optimizer.state[weight]["master_param"], after, "master")
    weight.data = kept
    assert_step_without_rate_keeps(
        module, optimizer, [before, *(its.dequantize() for its in [*module.parameters()][1:])]
    )


@every_optimizer
def test_copies_serve_every_model(make) -> None:
    """Two of them, put back by one copy, and one that is put back again after a step."""
    twins = Twins(make)
    weights = [next(module.parameters()) for module, _ in twins.pairs]
    kept = weights[0].detach().clone()
    masters = [
        optimizer.state[weight]["master_param"] for weight, (_, optimizer) in zip(weights, twins.pairs, strict=True)
    ]
    wanted = masters[0].clone()
    for _ in range(2):
        with torch.no_grad():
            for weight in weights:
                weight.mul_(2.0)
                weight.copy_(kept)
        for master in masters:
            assert_bitwise(master, wanted, "master")
        twins.train(1)


def test_former_masters_are_kept_as_long_as_copies_are_there() -> None:
    module = model("block", 0)
    optimizer = OPTIMIZERS["fused"](module)
    train(module, optimizer, 1)
    weight = next(module.parameters())
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(2.0)
    former = weakref.ref(writes.former_values(kept.storage))
    assert former() is not None and writes.former_values(weight.storage) is None
    del kept
    assert former() is None


def test_trained_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    """By `torch.load` as it is called by default; what is kept of former masters stays behind."""
    module = model("block", 0)
    optimizer = OPTIMIZERS["fused"](module)
    train(module, optimizer, 1)
    kept = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        next(module.parameters()).mul_(2.0)
    torch.save(kept, tmp_path / "weights.pt")
    loaded = torch.load(tmp_path / "weights.pt")
    for name, weight in kept.items():
        assert_bitwise(loaded[name], weight, name)
        assert loaded[name].storage.mastered == weight.storage.mastered != 0
        assert writes.former_values(loaded[name].storage) is None
    assert writes.former_values(kept["0.weight"].storage) is not None
