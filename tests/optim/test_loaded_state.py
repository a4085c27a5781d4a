"""Masters of state that is loaded or copied: whether they are in step with their weights, or follow them."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from te_dist import optim
from te_dist.optim.masters import initial_master
from te_dist.tensor import quantize
from te_dist.testing import assert_bitwise
from tests.optim.test_fused_adam import parameters, step
from tests.tensor.samples import signed

Make = Callable[[list[Tensor]], torch.optim.Optimizer]
OPTIMIZERS = {
    "fused": lambda params: optim.FusedAdam(params, lr=0.1),
    "wrapped": lambda params: optim.MasterWeights(params, lambda masters: torch.optim.Adam(masters, lr=0.1)),
}


@pytest.fixture(params=OPTIMIZERS)
def make(request: pytest.FixtureRequest) -> Make:
    return OPTIMIZERS[request.param]


def test_masters_that_are_loaded_after_their_weights_are_kept(make: Make) -> None:
    weight, _ = parameters()
    optimizer = make([weight])
    step(optimizer, 0)
    saved, codes = copy.deepcopy(optimizer.state_dict()), weight.detach().clone()
    step(optimizer, 1)
    with torch.no_grad():
        weight.copy_(codes)
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] = 0.0
    step(optimizer, 2)
    assert_bitwise(optimizer.state[weight]["master_param"], saved["state"][0]["master_param"], "master")


def test_masters_that_are_loaded_change_no_weights(make: Make) -> None:
    weight, _ = parameters()
    optimizer = make([weight])
    step(optimizer, 0)
    saved, other = copy.deepcopy(optimizer.state_dict()), signed(seed=7)
    with torch.no_grad():
        weight.copy_(other)
    wanted = initial_master(weight)
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] = 0.0
    step(optimizer, 1)
    assert_bitwise(optimizer.state[weight]["master_param"], wanted, "master")


def test_state_holds_what_was_written_since_the_step(make: Make) -> None:
    weight, _ = parameters()
    optimizer = make([weight])
    step(optimizer, 0)
    with torch.no_grad():
        weight.copy_(weight.detach().clamp(-0.25, 0.25))
    written = weight.dequantize(dtype=torch.float32)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0]["lr"] = 0.0
    step(optimizer, 1)
    assert_bitwise(optimizer.state[weight]["master_param"], written, "master")


def test_saving_while_others_are_swapped_in_leaves_masters_alone(make: Make) -> None:
    weight, _ = parameters()
    optimizer = make([weight])
    step(optimizer, 0)
    own, master = weight.detach().clone(), optimizer.state[weight]["master_param"].clone()
    with torch.no_grad():
        weight.copy_(signed(seed=7))
    saved = optimizer.state_dict()["state"][0]["master_param"]
    assert_bitwise(saved, initial_master(weight), "what is saved")
    with torch.no_grad():
        weight.copy_(own)
    optimizer.param_groups[0]["lr"] = 0.0
    step(optimizer, 1)
    assert_bitwise(optimizer.state[weight]["master_param"], master, "master")


def test_hooks_decide_what_is_loaded(make: Make) -> None:
    weight, _ = parameters()
    optimizer = make([weight])
    step(optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())

    def zeros(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        state = given["state"][0] | {"exp_avg": torch.zeros_like(given["state"][0]["exp_avg"])}
        return given | {"state": {0: state}}

    optimizer.register_load_state_dict_pre_hook(zeros)
    optimizer.load_state_dict(saved)
    assert not optimizer.state[weight]["exp_avg"].any()
    assert saved["state"][0]["exp_avg"].any()


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_know_which_masters_have_fallen_behind(way: str) -> None:
    weight, _ = parameters()
    first, second = (optim.FusedAdam([weight], lr=0.1) for _ in range(2))
    step(first, 0), step(second, 1)  # the first has fallen behind
    held = first, second, weight
    copied, _, own = copy.deepcopy(held) if way == "deepcopy" else pickle.loads(pickle.dumps(held))
    step(first, 2), step(copied, 2)
    assert_bitwise(own, weight, "weight")


def test_a_weight_that_is_rolled_back_stays_there() -> None:
    """Whatever another optimizer that was made meanwhile has seen."""
    weight, _ = parameters()
    first = optim.FusedAdam([weight], lr=0.1)
    step(first, 0)
    second, best = optim.FusedAdam([weight], lr=0.0), weight.detach().clone()
    step(first, 1)
    with torch.no_grad():
        weight.copy_(best)
    step(second, 2)
    assert_bitwise(weight.dequantize(), best.dequantize(), "weight")


def test_tied_weights_are_numbered_as_torch_numbers_them(make: Make) -> None:
    (first, _), (second, _) = parameters(), parameters("mxfp8_1d")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a parameter that is there twice
        optimizer = make([first, first, second])
    step(optimizer, 0)
    saved = optimizer.state_dict()
    for number, param in zip(saved["param_groups"][0]["params"], (first, first, second), strict=True):
        assert saved["state"][number]["exp_avg"] is optimizer.state[param]["exp_avg"]


def test_hooks_decide_what_is_saved(make: Make) -> None:
    weight, _ = parameters()
    optimizer = make([weight])
    step(optimizer, 0)
    optimizer.register_state_dict_post_hook(lambda _, saved: saved | {"state": {0: {"only": 1}}})
    assert optimizer.state_dict()["state"] == {0: {"only": 1}}


def test_masters_of_removed_parameters_are_let_go() -> None:
    weights = [parameters()[0] for _ in range(2)]
    optimizer = optim.FusedAdam(weights, lr=0.1)
    step(optimizer, 0)
    master = weakref.ref(optimizer.state[weights[1]]["master_param"])
    del optimizer.state[weights[1]], optimizer.param_groups[0]["params"][1]
    for seed in (1, 2):
        step(optimizer, seed)
    gc.collect()
    assert master() is None or len(optimizer._ledger._known) == 1


def test_masters_that_begin_anew_from_rounded_values_are_told_of_once(make: Make) -> None:
    weight, _ = parameters()
    optimizer = make([weight])
    step(optimizer, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in (1, 2):
            with torch.no_grad():
                weight.copy_(weight.detach() * 1.0)
            step(optimizer, seed)
    assert ["begins anew from values that are rounded" in str(each.message) for each in caught] == [True]


IN_PLACE: dict[str, Callable[[Tensor], object]] = {
    "clamp_": lambda weight: weight.clamp_(-0.25, 0.25),
    "mul_": lambda weight: weight.mul_(1 - 2**-12),
    "add_": lambda weight: weight.add_(torch.full_like(weight, 2**-12)),
    "_foreach_mul_": lambda weight: torch._foreach_mul_([weight], 1 - 2**-12),
}


@pytest.mark.parametrize("op", IN_PLACE)
def test_ops_in_place_change_masters(make: Make, op: str) -> None:
    """By less than the distance of two codes, too: weights are what their masters are quantized to."""
    weight, _ = parameters()
    optimizer = make([weight])
    step(optimizer, 0)
    wanted = optimizer.state[weight]["master_param"].clone()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for _ in range(3):
            IN_PLACE[op](weight)
            IN_PLACE[op](wanted)
        codes = quantize(wanted, weight.format)
        assert_bitwise(weight.dequantize(dtype=torch.float32), codes.dequantize(), "weight")
        assert_bitwise(optimizer.state_dict()["state"][0]["master_param"], wanted, "what is saved")
        optimizer.param_groups[0]["lr"] = 0.0
        step(optimizer, 1)
    assert_bitwise(optimizer.state[weight]["master_param"], wanted, "master")


def test_ops_that_change_nothing_leave_training_alone(make: Make) -> None:
    (weight, _), (other, _) = parameters(), parameters()
    optimizer, another = make([weight]), make([other])
    for seed in range(4):
        step(optimizer, seed), step(another, seed)
        with torch.no_grad():
            weight.clamp_(-100.0, 100.0).nan_to_num_().mul_(1.0)
    assert_bitwise(weight, other, "weight")
    assert_bitwise(optimizer.state[weight]["master_param"], another.state[other]["master_param"], "master")


def test_copies_of_weights_have_no_masters(make: Make) -> None:
    """An average that began as a copy is its own."""
    weight, _ = parameters()
    optimizer = make([weight])
    step(optimizer, 0)
    master, average = optimizer.state[weight]["master_param"].clone(), weight.detach().clone()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        average.mul_(0.5).add_(weight)
    assert_bitwise(optimizer.state[weight]["master_param"], master, "master")


@pytest.mark.parametrize("write", ["nothing", "its own", "another's", "far"])
def test_masters_that_lose_nothing_are_not_told_of(make: Make, write: str) -> None:
    weight, _ = parameters()
    optimizer, another = make([weight]), make([weight])
    step(optimizer, 0), step(another, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad():
            if write == "its own":
                weight.copy_(weight.detach().clone())
            elif write == "another's":
                step(another, 2)
            elif write == "far":
                weight.copy_(signed(seed=7))
        step(optimizer, 3)
    assert not caught


def test_a_master_alone_is_no_state_to_load() -> None:
    """Beside checkpoints, which hold it of before the first step."""
    weight, _ = parameters()
    optimizer = optim.FusedAdam([weight], lr=0.1)
    step(optimizer, 0)
    saved = optimizer.state_dict()
    alone = saved | {"state": {0: {"master_param": saved["state"][0]["master_param"]}}}
    with pytest.raises(ValueError, match="make the optimizer with the options it was saved with"):
        optimizer.load_state_dict(alone)


def test_what_torchs_adam_has_kept_goes_on_with_masters_that_begin(make: Make) -> None:
    """To what kernels of torch round otherwise, it goes on as torch's would with weights that are not quantized."""
    plain = torch.nn.Parameter(signed().float())
    its = torch.optim.Adam([plain], lr=0.1)
    step(its, 0)
    weight, _ = parameters()
    with torch.no_grad():
        weight.copy_(plain)
        plain.copy_(weight)
    optimizer = make([weight])
    saved = copy.deepcopy(its.state_dict())
    with pytest.raises(ValueError, match=r"wanted .*master_param.*begin_masters=True"):
        optimizer.load_state_dict(saved)
    assert not optimizer.state
    optimizer.load_state_dict(saved, begin_masters=True)
    for each in (its, optimizer):
        step(each, 1)
    assert_close(optimizer.state[weight]["master_param"], plain.detach())
    assert_close(optimizer.state[weight]["exp_avg_sq"], its.state[plain]["exp_avg_sq"])
    assert optimizer.state[weight]["step"] == 2  # noqa: PLR2004


# -- parameters in 16 bits --------------------------------------------------------------------------------------------


def half(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    return torch.nn.Parameter(values.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_of_plain_parameters_follow_what_is_written(make: Make, dtype: torch.dtype) -> None:
    param = half((33, 7), dtype)
    optimizer = make([param])
    step(optimizer, 0)
    before = optimizer.state[param]["master_param"].clone()
    with torch.no_grad():
        param[:11] = 0.125
    wanted = torch.cat([torch.full((11, 7), 0.125), before[11:]])  # what was not written keeps all its bits
    assert_bitwise(optimizer.state_dict()["state"][0]["master_param"], wanted, "master that is saved")
    assert_bitwise(optimizer.state[param]["master_param"], before, "master here")
    optimizer.param_groups[0]["lr"] = 0.0
    step(optimizer, 1)
    assert_bitwise(optimizer.state[param]["master_param"], wanted, "master after a step")


def test_several_optimizers_take_turns_at_a_plain_parameter(make: Make) -> None:
    param = half((33, 7))
    first, second = make([param]), make([param])
    for optimizer in (first, second, first):
        before = param.detach().clone()
        optimizer.param_groups[0]["lr"] = 0.0
        step(optimizer, 0)
        assert torch.equal(param, before), "a step without a rate moved it"
        optimizer.param_groups[0]["lr"] = 0.1
        step(optimizer, 1)


def test_loaded_masters_of_plain_parameters_outlive_another_type(make: Make) -> None:
    narrow, wide = half((33, 7)), half((33, 7), torch.float16)
    optimizer, another = make([narrow]), make([wide])
    step(optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    with torch.no_grad():
        wide.copy_(narrow)
    another.load_state_dict(saved)
    another.param_groups[0]["lr"] = 0.0
    step(another, 1)
    assert_bitwise(another.state[wide]["master_param"], saved["state"][0]["master_param"], "master")


def test_a_parameter_that_is_cast_to_16_bits_has_a_master_from_then_on() -> None:
    param = half((33, 7), torch.float32)
    optimizer = optim.FusedAdam([param], lr=0.1)
    step(optimizer, 0)
    moments = optimizer.state[param]["exp_avg"].clone()
    param.grad = None
    param.data = param.data.bfloat16()
    begun = param.detach().float()
    optimizer.param_groups[0]["lr"] = 0.0
    step(optimizer, 1)
    assert_bitwise(optimizer.state[param]["master_param"], begun, "master")
    assert not torch.equal(optimizer.state[param]["exp_avg"], moments)


# -- state that cannot be that of a parameter -------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"exp_avg_dtype": torch.uint8}, {"store_param_remainders": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("saved", "here"), [((64, 48), (96, 48)), ((96, 48), (64, 48)), ((48, 64), (64, 48))], ids=str)
def test_state_of_another_shape_is_refused(saved, here, dtype: torch.dtype, options: dict[str, Any]) -> None:
    other, param = half(saved, dtype), half(here, dtype)
    optimizer, its = (optim.FusedAdam([each], lr=0.1, **options) for each in (param, other))
    step(its, 0)
    before = param.detach().clone()
    with pytest.raises(
        ValueError, match=rf"of a parameter of shape {re.escape(str(here))}: got .* of shape .*, wanted"
    ):
        optimizer.load_state_dict(its.state_dict())
    assert not optimizer.state
    assert torch.equal(param, before)


@pytest.mark.parametrize("how", ["shape", "dtype", "missing", "resized", "cut", "state cut", "expanded"])
def test_state_that_was_changed_by_hand_is_checked_before_it_is_used(how: str) -> None:
    param = half((64, 48))
    optimizer = optim.FusedAdam([param], lr=0.1)
    step(optimizer, 0)
    state = optimizer.state[param]
    match how:
        case "shape":
            state["exp_avg"] = state["exp_avg"][:32].clone()
        case "dtype":
            state["exp_avg"] = state["exp_avg"].double()
        case "missing":
            del state["exp_avg"]
        case "resized":
            param.data = param.data[:32].clone()
        case "expanded":
            state["exp_avg"] = torch.zeros(()).expand(64, 48)
        case "cut":  # where it lay
            param.data = param.data[:32]
        case "state cut":
            state["exp_avg"].data = state["exp_avg"].data[:32]
    with pytest.raises(ValueError, match="exp_avg of a parameter of shape"):
        step(optimizer, 1)


def test_state_in_another_order_is_loaded() -> None:
    params = [half((64, 48)), half((64, 48))]
    optimizers = [optim.FusedAdam([param], lr=0.1) for param in params]
    step(optimizers[0], 0)
    saved = copy.deepcopy(optimizers[0].state_dict())
    saved["state"][0] = {k: v.t().contiguous().t() if v.dim() else v for k, v in saved["state"][0].items()}
    with torch.no_grad():
        params[1].copy_(params[0])
    optimizers[1].load_state_dict(saved)
    for optimizer in optimizers:
        step(optimizer, 1)
    assert_bitwise(params[1].detach(), params[0].detach(), "parameter")


def test_sparse_gradients_are_refused() -> None:
    table = torch.nn.Embedding(8, 4, sparse=True)
    table(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(ValueError, match="got torch.sparse_coo, wanted a dense one; pass sparse=False"):
        optim.FusedAdam(table.parameters()).step()


def test_masters_of_another_shape_are_refused() -> None:
    weight, _ = parameters()
    its = optim.MasterWeights([weight], torch.optim.SGD)
    step(its, 0)
    other = half((3, 5))
    optimizer = optim.MasterWeights([other], torch.optim.SGD)
    with pytest.raises(ValueError, match=r"master_param of a parameter of shape \(3, 5\): got shape"):
        optimizer.load_state_dict(its.state_dict())
