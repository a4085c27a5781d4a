"""Optimizers that hold other parameters than those that passes train refuse to step; what they say to do works."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from te_dist import fsdp2, optim, testing
from te_dist.recipe import Float8BlockScaling
from te_dist.tensor import QuantizedTensor
from te_dist.tensor.placement import local_tensor
from te_dist.tensor_parallel import ColumnParallel
from te_dist.testing import assert_bitwise
from tests.distributed.probe import random_matrix

SIZE = 128
RECIPE = Float8BlockScaling()
Make = Callable[..., torch.optim.Optimizer]


def layers(*, quantized: bool = True) -> nn.Sequential:
    """Two linear maps, and an embedding in front of them."""
    with te.quantized_model_init(enabled=quantized, recipe=RECIPE):
        return nn.Sequential(nn.Embedding(8, SIZE), *(te.Linear(SIZE, SIZE) for _ in range(2)))


def shard(model: nn.Sequential, world: int, wrap: Callable[..., object] = fsdp2.fully_shard) -> None:
    """Each linear map as a unit, the embedding and what is behind the maps with the root."""
    over = testing.mesh((world,), ("dp",))
    for unit in (*model[1:3], model):
        wrap(unit, mesh=over)


def backward(model: nn.Module) -> None:
    with te.autocast(recipe=RECIPE):
        model(torch.arange(8, device=testing.device())).square().sum().backward()


def values(model: nn.Module) -> dict[str, Tensor]:
    """What ranks hold, decoded."""
    found = {name: local_tensor(param).detach() for name, param in model.state_dict().items()}
    return {
        name: part.dequantize() if isinstance(part, QuantizedTensor) else part.clone() for name, part in found.items()
    }


def assert_trains(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    before = values(model)
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    still = {name for name, value in values(model).items() if torch.equal(value, before[name])}
    assert not trained & still


def evaluate(model: nn.Module) -> None:
    """The root stays gathered after a forward pass."""
    with torch.no_grad(), te.autocast(recipe=RECIPE):
        model(torch.arange(8, device=testing.device()))


def step_with_what_is_gathered(rank: int, world: int, make: Make) -> None:
    """The embedding, whose unit is the root; torch's optimizers step on no quantized parameters at all."""
    quantized = make is optim.FusedAdam
    model = layers(quantized=quantized).to(testing.device())
    shard(model, world, fsdp2.fully_shard if quantized else torch_fully_shard)
    evaluate(model)
    optimizer = make(model.parameters(), lr=1.0)
    for _ in range(2):
        backward(model)
        with pytest.raises(
            RuntimeError, match=rf"{make.__name__} holds 1 .* gathered .*, weight \(8, 128\) of .*Embedding, "
        ):
            optimizer.step()
        optimizer.zero_grad()
    evaluate(model)
    model.reshard()
    assert_trains(model, make(model.parameters(), lr=1.0))
    model[0].requires_grad_(False)
    evaluate(model)
    assert_trains(model, make(model.parameters(), lr=1.0))  # what is frozen may be what was gathered


@pytest.mark.parametrize("make", [optim.FusedAdam, torch.optim.SGD])
def test_an_optimizer_of_what_an_evaluation_left_gathered_refuses_to_step(ranks, make: Make) -> None:
    ranks(2).run(step_with_what_is_gathered, make)


class Failing(nn.Module):
    """The identity, or an exception."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError
        return x


def fail_forward(model: nn.Module) -> None:
    """All that came before the exception stays gathered."""
    model[-1].fails = True
    with pytest.raises(ArithmeticError):
        backward(model)
    model[-1].fails = False


def step_behind(rank: int, world: int, look: Callable[[nn.Module], None], make: Make, quantized: bool) -> None:
    """Behind another pass, which lies between backward and the step and leaves weights gathered."""
    outs = []
    for looks in (False, True):
        torch.manual_seed(0)
        model = layers(quantized=quantized).append(Failing()).to(testing.device())
        shard(model, world)
        optimizer = make(model.parameters(), lr=1e-3)
        for _ in range(2):
            backward(model)
            if looks:
                look(model)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad(), te.autocast(recipe=RECIPE):
            outs.append(model(torch.arange(8, device=testing.device())))
    assert_bitwise(*outs, "what a pass after the steps gives")


BOTH = pytest.mark.parametrize(("make", "quantized"), [(optim.FusedAdam, True), (torch.optim.SGD, False)])


@BOTH
def test_passes_behind_a_step_see_it_also_where_an_evaluation_left_weights_gathered(
    ranks, make: Make, quantized: bool
) -> None:
    ranks(2).run(step_behind, evaluate, make, quantized)


@BOTH
def test_passes_behind_a_step_see_it_also_where_forward_raised(make: Make, quantized: bool) -> None:
    # NOTE: on GPUs torch's gathers wait for no step then, until `reset_iter_state`.
    testing.pool(2).run(step_behind, fail_forward, make, quantized)


def step_with_gathered_weights(rank: int, world: int) -> None:
    """Gathered by hand, quantized ones, one of them a part of what tensor parallelism has cut."""
    grid = testing.mesh((world // 2, 2), ("dp", "tp"))
    model = layers().to(testing.device())
    parallelize_module(model, grid["tp"], {"1": ColumnParallel()})
    for unit in model[1:]:
        fsdp2.fully_shard(unit, mesh=grid["dp"])
        unit.unshard()
    optimizer = optim.MasterWeights(model[1:].parameters(), lambda params: torch.optim.SGD(params, lr=0.1))
    for unit in model[1:]:
        unit.reshard()
    with pytest.raises(
        RuntimeError, match=r"holds 4 .* gathered .*, weight \(128, 128\) of .*Linear, bias \(128,\) of"
    ):
        optimizer.step()


def test_gathered_parameters_are_told_where_they_are_quantized_and_cut_twice(ranks) -> None:
    ranks(4).run(step_with_gathered_weights)


def step_with_gradient_of_before(rank: int, world: int) -> None:
    model = layers().to(testing.device())
    optimizer = optim.FusedAdam(model.parameters(), lr=0.1)
    backward(model)
    shard(model, world)
    for set_to_none in (False, False, True):  # zeros in the gradients of before; then there are none
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(model)
        with pytest.raises(
            RuntimeError, match=r"FusedAdam holds 5 weights that fully_shard has exchanged for others, .* of "
        ):
            optimizer.step()
    assert_trains(model, optim.FusedAdam(model.parameters(), lr=1.0))


def test_gradients_of_before_weights_were_exchanged_are_no_training(ranks) -> None:
    ranks(2).run(step_with_gradient_of_before)


def test_a_weight_that_another_model_goes_on_to_train_keeps_its_gradient() -> None:
    """Added to in place, or made anew; one that nobody adds to is that of before."""
    model = nn.ModuleList([nn.Linear(SIZE, SIZE)])
    other = nn.Linear(SIZE, SIZE)
    other.weight = model[0].weight
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(random_matrix(4, SIZE, 1)).sum().backward()
    te.convert(model, {"*": RECIPE})
    with pytest.raises(RuntimeError, match=r"SGD holds 1 weights that te_dist.convert has exchanged for others, 0.w"):
        optimizer.step()
    for set_to_none in (False, True):
        optimizer.zero_grad(set_to_none=set_to_none)
        other(random_matrix(4, SIZE, 1)).sum().backward()
        before = other.weight.detach().clone()
        optimizer.step()
        assert not torch.equal(other.weight, before)


def clones(model: nn.Module) -> dict[str, Tensor]:
    """Of all but the last linear map's parameters."""
    return {name: value.clone() for name, value in model.state_dict().items() if not name.startswith("2.")}


def step_with_what_was_assigned_over(rank: int, world: int, gathered: bool) -> None:
    model = layers().to(testing.device())
    for unit in model:
        fsdp2.fully_shard(unit, mesh=testing.mesh((world,), ("dp",)))
    optimizer = optim.FusedAdam(model.parameters(), lr=1.0)
    assert_trains(model, optimizer)
    state = clones(model)
    for unit in model if gathered else ():
        unit.unshard()
    model.load_state_dict(state, assign=True, strict=False)
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(model)
        with pytest.raises(RuntimeError, match=r"holds 3 .*assign=True\) .*, 0.weight, 1.weight, 1.bias, "):
            optimizer.step()
    assert_trains(model, optim.FusedAdam(model.parameters(), lr=1.0))


@pytest.mark.parametrize("gathered", [False, True])
def test_an_optimizer_of_shards_that_others_were_assigned_over_refuses_to_step(ranks, gathered: bool) -> None:
    ranks(2).run(step_with_what_was_assigned_over, gathered)


def test_an_optimizer_of_weights_that_others_were_assigned_over_refuses_to_step() -> None:
    model = layers()
    optimizer = optim.FusedAdam(model[1:].parameters(), lr=1.0)
    model[1:](random_matrix(4, SIZE, 1)).sum().backward()
    model.load_state_dict(clones(model), assign=True, strict=False)
    with pytest.raises(RuntimeError, match=r"holds 2 .* load_state_dict\(assign=True\) .* 1.weight, 1.bias, "):
        optimizer.step()


def go_on_after_a_refused_load(rank: int, world: int) -> None:
    """Nothing was exchanged where one value of a module does not fit."""
    model, over = layers().to(testing.device()), testing.mesh((world,), ("dp",))
    shard(model, world)
    optimizer = optim.FusedAdam(model.parameters(), lr=1.0)
    whole = distribute_tensor(torch.zeros(SIZE, SIZE, device=testing.device()), over, [Replicate()])
    with pytest.raises(ValueError, match="weight: assigned is"):
        model[1].load_state_dict({"bias": model[1].bias.detach().clone(), "weight": whole}, assign=True)
    optimizer.step()


def test_a_load_that_was_refused_leaves_the_optimizer_be(ranks) -> None:
    ranks(2).run(go_on_after_a_refused_load)


def fail(gradient: Tensor) -> None:
    raise ValueError("on purpose")


def step_after_a_failure(rank: int, world: int, make: Make, quantized: bool) -> None:
    """Refused as long as FSDP2 waits for the end of the failed pass; and then as if that had never been."""
    found = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = layers(quantized=quantized).append(nn.Linear(SIZE, SIZE)).to(testing.device())
        shard(model, world)
        optimizer = make(model.parameters(), lr=0.1)
        assert_trains(model, optimizer)
        optimizer.zero_grad()
        if fails:
            handle = model[1].register_forward_hook(lambda module, args, out: (out.register_hook(fail), None)[1])
            with pytest.raises(ValueError, match="on purpose"):
                backward(model)
            handle.remove()
            with pytest.raises(RuntimeError, match=r"has no gradients of .*reset_iter_state\(\) of the root module"):
                optimizer.step()
            if not hasattr(model, "reset_iter_state"):  # before torch 2.13
                return
            model.zero_grad()
            model.reset_iter_state()
        for _ in range(2):
            assert_trains(model, optimizer)
        found.append(values(model))
    for name, want in found[0].items():
        testing.assert_bitwise(found[1][name], want, name)


def wrapped_adam(params: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return optim.MasterWeights(params, lambda params: torch.optim.Adam(params, **options))


@pytest.mark.parametrize("make", [optim.FusedAdam, wrapped_adam, torch.optim.Adam])
def test_a_step_after_a_failed_backward_pass_is_refused(ranks, make: Make) -> None:
    ranks(2).run(step_after_a_failure, make, make is not torch.optim.Adam)


def forget_the_root(rank: int, world: int, make: Make, quantized: bool) -> None:
    """Told at the first step; not of a whole model, of what is frozen, or where one rank has it all."""
    for units, told in ((slice(1, 3), True), (slice(0, 3), False)):
        model = layers(quantized=quantized).to(testing.device())
        for unit in model[units]:
            fsdp2.fully_shard(unit, mesh=testing.mesh((world,), ("dp",)))
        # Each by itself: ops on lists take no plain tensors beside DTensors.
        optimizer = make([{"params": [param]} for param in model.parameters()], lr=1e-3)
        for step in range(2):
            backward(model)
            with warnings.catch_warnings(record=True) as messages:
                warnings.simplefilter("always")
                optimizer.step()
            found = [str(each.message) for each in messages if "belong to no unit of FSDP2" in str(each.message)]
            if told and world > 1 and step == 0:
                assert len(found) == 1
                assert f"trains 1 parameters that belong to no unit of FSDP2, of shapes (8, {SIZE})," in found[0]
                assert messages[0].filename == __file__
            else:
                assert not found


@BOTH
@pytest.mark.parametrize("world", [1, 2])
def test_a_first_step_tells_of_parameters_of_no_unit(ranks, world: int, make: Make, quantized: bool) -> None:
    ranks(world).run(forget_the_root, make, quantized)
