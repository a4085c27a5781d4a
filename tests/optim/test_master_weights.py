"""Optimizers of torch over masters: what they do to fp32 parameters, quantized; one optimizer to everybody outside."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from te_dist import checkpoints, grouped, optim
from te_dist.catalog import FORMATS
from te_dist.fsdp2 import GroupedParameter, QuantizedParameter
from te_dist.tensor import QuantizedTensor, quantize
from te_dist.testing import assert_bitwise
from tests.tensor.samples import SHAPE, signed

Make = Callable[[list], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "SGD momentum, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "SGD momentum, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW, loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),  # makes its state beforehand
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}
MATRICES = {"Muon": lambda p: torch.optim.Muon(p, lr=0.1)} if hasattr(torch.optim, "Muon") else {}


class Model(nn.Module):
    """A quantized matrix, a group of them, 16-bit and fp32 vectors; or their values as one plain model in fp32."""

    def __init__(self, name: str | None, *, only_matrix: bool = False) -> None:
        super().__init__()
        weight, experts = signed(), signed(3, 96, 160, seed=1)
        self.weight = nn.Parameter(weight.float())
        if name is not None:
            weight = QuantizedParameter(quantize(weight, FORMATS[name]).storage)
            self.weight = nn.Parameter(weight)
            weight.storage.initial = signed().float()
        if only_matrix:
            return
        self.experts = nn.Parameter(experts.float())
        if name is not None:
            self.experts = nn.Parameter(GroupedParameter(grouped.quantize(experts, FORMATS[name]).storage))
            self.experts.storage.initial = experts.float()
        sixteen = torch.float32 if name is None else None
        self.bf16 = nn.Parameter(signed(33, seed=2).to(sixteen or torch.bfloat16))
        self.fp16 = nn.Parameter(signed(7, 3, seed=3).to(torch.float16).to(sixteen or torch.float16))
        self.fp32 = nn.Parameter(signed(5, seed=4).float())

    def give_gradients(self, turn: int) -> None:
        for seed, param in enumerate(self.parameters()):
            param.grad = signed(*param.shape, seed=100 * turn + seed).to(param.dtype)


def masters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [optimizer.state[p].get("master_param", p.detach()) for p in model.parameters()]


def assert_written_back(model: nn.Module, values: list[Tensor]) -> None:
    """Parameters are these values, quantized or rounded."""
    for (name, param), value in zip(model.named_parameters(), values, strict=True):
        if isinstance(param, QuantizedTensor):
            storage = param.storage
            want = (
                grouped.quantize(value, storage.format).storage
                if name == "experts"
                else quantize(value, storage.format).storage
            )
            for field, buffer in storage.buffers.items():
                assert_bitwise(buffer, want.buffers[field], f"{field} of {name}")
        else:
            assert_bitwise(param.detach(), value.to(param.dtype), name)


def train_beside_plain(name: str, make: Make, *, only_matrix: bool) -> None:
    model, plain = (Model(each, only_matrix=only_matrix) for each in (name, None))
    optimizer, oracle = optim.MasterWeights(model.parameters(), make), make(list(plain.parameters()))
    for turn in range(3):
        model.give_gradients(turn)
        for param, own in zip(plain.parameters(), model.parameters(), strict=True):
            param.grad = own.grad.float()
        optimizer.step()
        oracle.step()
        want = [param.detach() for param in plain.parameters()]
        for number, (got, value) in enumerate(zip(masters(model, optimizer), want, strict=True)):
            assert_bitwise(got, value, f"master {number} after step {turn}")
        assert_written_back(model, want)
        assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("name", ["float8_block_2d", "float8_tensorwise"])
def test_masters_are_the_parameters_of_a_plain_model(name: str, make: Make) -> None:
    train_beside_plain(name, make, only_matrix=False)


@pytest.mark.parametrize("make", MATRICES.values(), ids=MATRICES)
def test_optimizers_of_matrices(make: Make) -> None:
    train_beside_plain("float8_block_2d", make, only_matrix=True)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_written_back(name: str) -> None:
    train_beside_plain(name, OPTIMIZERS["AdamW, foreach"], only_matrix=True)


def test_a_closure_sees_the_masters_of_the_moment() -> None:
    target = signed(seed=9).float()
    model, plain = Model("float8_block_2d", only_matrix=True), Model(None, only_matrix=True)
    seen = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        values = model.weight.dequantize(dtype=torch.float32)
        seen.append(values)
        model.weight.grad = (values - target).to(torch.bfloat16)
        return (values - target).square().sum() / 2

    optimizer = optim.MasterWeights(model.parameters(), lambda p: torch.optim.LBFGS(p, lr=1.0, max_iter=4))
    first = optimizer.step(closure)
    assert first == (seen[0] - target).square().sum() / 2
    assert len(seen) > 1
    assert closure() < first / 100
    assert_written_back(model, masters(model, optimizer))
    assert plain.weight.grad is None


def two_groups(model: Model) -> optim.MasterWeights:
    named = list(model.named_parameters())
    groups = [{"params": named[:2]}, {"params": named[2:], "lr": 0.5, "weight_decay": 0.0}]
    return optim.MasterWeights(groups, lambda g: torch.optim.AdamW(g, lr=0.1, weight_decay=0.1))


def test_schedulers_and_hooks_see_one_optimizer() -> None:
    model = Model("mxfp8_1d")
    optimizer, calls = two_groups(model), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    assert optimizer.defaults["betas"] == (0.9, 0.999)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "experts"]
    assert list(optimizer.param_groups[0]["params"]) == [model.weight, model.experts]
    for turn in range(3):
        model.give_gradients(turn)
        optimizer.step()
        assert [g["lr"] for g in optimizer.wrapped.param_groups] == [0.1 / (1 + turn), 0.5 / (1 + turn)]
        schedule.step()
    assert calls == ["before", "after"] * 3
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("through", ["state_dict", "deepcopy", "pickle", "dcp", "checkpoint"])
def test_training_goes_on_as_if_nothing_had_happened(through: str, tmp_path) -> None:
    model = Model("float8_tensorwise")
    optimizer = two_groups(model)
    for turn in range(2):
        model.give_gradients(turn)
        optimizer.step()
    optimizer.zero_grad()
    if through in ("deepcopy", "pickle"):
        pair = (model, optimizer)
        twin, other = copy.deepcopy(pair) if through == "deepcopy" else pickle.loads(pickle.dumps(pair))
    else:
        twin = Model("float8_tensorwise")
        other = two_groups(twin)
    if through == "checkpoint":
        checkpoints.save(tmp_path / "c", model=model, optimizer=optimizer)
        checkpoints.load(tmp_path / "c", model=twin, optimizer=other)
    elif through == "dcp":
        get_optimizer_state_dict(twin, other)  # makes the state, as distributed checkpoints want it
        twin.load_state_dict(model.state_dict())
        set_optimizer_state_dict(twin, other, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
    elif through == "state_dict":
        twin.load_state_dict(copy.deepcopy(model.state_dict()))
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((model, optimizer), (twin, other)):
        each.give_gradients(2)
        its.step()
    assert_written_back(twin, masters(model, optimizer))
    for param, own in zip(model.parameters(), twin.parameters(), strict=True):
        for key, value in optimizer.state[param].items():
            assert_bitwise(other.state[own][key], value, key)


def allocated(optimizer: optim.MasterWeights) -> int:
    """Bytes of what is in the place of parameters in the wrapped optimizer."""
    held = [param for group in optimizer.wrapped.param_groups for param in group["params"]]
    return sum(param.untyped_storage().nbytes() for param in held)


@pytest.mark.parametrize("make", [OPTIMIZERS["AdamW, fused"], OPTIMIZERS["Adagrad"]], ids=["AdamW", "Adagrad"])
def test_frozen_parameters_have_masters_once_they_are_trained(make: Make) -> None:
    """From then on, as if they had been trained alone."""
    model, plain = Model("float8_block_2d"), Model(None)
    frozen = ["weight", "bf16"]
    for name in frozen:
        getattr(model, name).requires_grad_(False)
    optimizer, oracle = optim.MasterWeights(model.parameters(), make), make(list(plain.parameters()))
    trained = sum(p.numel() for n, p in model.named_parameters() if n not in frozen)
    assert allocated(optimizer) < 4 * trained + 16
    kept = {name: getattr(model, name).detach().clone() for name in frozen}
    for turn in range(4):
        model.give_gradients(turn)
        for name, param in model.named_parameters():
            if turn < 2 and name in frozen:
                param.grad = None
            getattr(plain, name).grad = None if param.grad is None else param.grad.float()
        if turn == 2:
            for name in frozen:
                getattr(model, name).requires_grad_(True)
        optimizer.step()
        oracle.step()
        if turn < 2:
            assert all(torch.equal(getattr(model, name), kept[name]) for name in frozen)
            assert allocated(optimizer) < 4 * trained + 16
            assert not any("master_param" in optimizer.state[getattr(model, name)] for name in frozen)
    assert_written_back(model, [param.detach() for param in plain.parameters()])
    for param, own in zip(plain.parameters(), model.parameters(), strict=True):
        for key, value in oracle.state[param].items():
            assert_bitwise(optimizer.state[own][key], value, key)
    assert len(optimizer.wrapped.state) == len(list(model.parameters()))


def test_what_calls_a_closure_has_masters_of_frozen_parameters() -> None:
    """It updates all parameters by one vector, which has zeros for them."""
    model = Model("float8_block_2d")
    model.experts.requires_grad_(False)
    optimizer = optim.MasterWeights(model.parameters(), lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2))
    kept = model.experts.detach().clone()

    def closure() -> Tensor:
        model.give_gradients(0)
        model.experts.grad = None
        return torch.ones(())

    optimizer.step(closure)
    assert torch.equal(model.experts, kept)


def test_state_without_masters_is_refused_unless_they_are_to_begin() -> None:
    model, plain = Model("float8_block_2d"), Model(None)
    own = torch.optim.AdamW(plain.parameters(), lr=0.1)
    plain.give_gradients(0)
    own.step()
    optimizer = optim.MasterWeights(model.parameters(), lambda p: torch.optim.AdamW(p, lr=0.1))
    model.give_gradients(5)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"shape \(.*got \['exp_avg'.*wanted master_param.*begin_masters=True"):
        optimizer.load_state_dict(own.state_dict())
    for index, state in before["state"].items():
        for key, value in state.items():
            assert_bitwise(optimizer.state_dict()["state"][index][key], value, key)
    optimizer.load_state_dict(copy.deepcopy(own.state_dict()), begin_masters=True)
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict({name: param * 1.0 for name, param in model.state_dict().items()})
    for each, its in ((model, optimizer), (plain, own)):
        each.give_gradients(1)
        if each is plain:
            for param, other in zip(plain.parameters(), model.parameters(), strict=True):
                param.grad = other.grad.float()
        its.step()
    assert_written_back(model, [param.detach() for param in plain.parameters()])


def test_groups_can_be_added() -> None:
    model, plain = Model("float8_block_2d"), Model(None)
    first, *rest = model.parameters()
    optimizer = optim.MasterWeights([first], lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer.add_param_group({"params": rest, "lr": 0.2})
    model.give_gradients(0)
    optimizer.step()
    want = [
        value.detach() - (0.1 if number == 0 else 0.2) * param.grad.float()
        for number, (value, param) in enumerate(zip(plain.parameters(), model.parameters(), strict=True))
    ]
    assert_written_back(model, want)


def test_values_written_between_steps_are_followed() -> None:
    model = Model("float8_block_2d")
    optimizer = optim.MasterWeights(model.parameters(), lambda p: torch.optim.SGD(p, lr=0.0))
    loaded = signed(33, seed=20)
    with torch.no_grad():
        model.bf16.copy_(loaded)  # after the optimizer was made, before its first step
    for turn in range(2):
        with torch.no_grad():
            model.weight.copy_(signed(seed=10 + turn))
        want = model.weight.dequantize(dtype=torch.float32)
        model.give_gradients(turn)
        optimizer.step()
        assert_bitwise(optimizer.state[model.weight]["master_param"], want, "master")
    assert_bitwise(model.bf16.detach(), loaded, "bf16 parameter")


def test_parameters_that_were_exchanged_have_masters_of_their_own() -> None:
    """As libraries do that shard a model after its optimizer was made."""
    model, other = Model("float8_block_2d"), Model("float8_block_2d")
    optimizer = optim.MasterWeights(model.parameters(), lambda p: torch.optim.SGD(p, lr=0.1))
    for group in optimizer.param_groups:
        group["params"] = list(other.parameters())
    other.give_gradients(0)
    optimizer.step()
    plain = Model(None)
    want = [v.detach() - 0.1 * p.grad.float() for v, p in zip(plain.parameters(), other.parameters(), strict=True)]
    assert_written_back(other, want)
    assert len(optimizer._masters) == 5


def test_a_scaler_leaves_out_steps_with_infinities() -> None:
    model = Model("float8_block_2d")
    optimizer = optim.MasterWeights(model.parameters(), OPTIMIZERS["AdamW, fused"])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for turn in range(2):
        before = model.weight.dequantize()
        for param in model.parameters():
            param.grad_dtype = torch.float32
            param.grad = torch.ones(param.shape) * 1024
        if turn:
            model.fp32.grad[0] = math.inf
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight.dequantize(), before) == bool(turn)


def test_an_optimizer_of_other_groups_is_refused() -> None:
    model = Model("float8_block_2d")
    with pytest.raises(ValueError, match=r"\[2, 3\] parameters in its groups, wanted .*\[5\]"):
        optim.MasterWeights(
            model.parameters(), lambda p: torch.optim.SGD([{"params": p[:2]}, {"params": p[2:]}], lr=0.1)
        )


def test_an_optimizer_in_the_place_of_what_makes_it_is_refused() -> None:
    params = list(Model("float8_block_2d").parameters())
    with pytest.raises(TypeError, match="make: got SGD, wanted a function .*lambda params"):
        optim.MasterWeights(params, torch.optim.SGD(params, lr=0.1))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("make", [OPTIMIZERS["SGD"], OPTIMIZERS["AdamW, foreach"]])
def test_optimizers_without_masters_are_refused(name: str, make: Make) -> None:
    model = Model(name)
    kept = {field: buffer.clone() for field, buffer in model.weight.storage.buffers.items()}
    optimizer = make(list(model.parameters()))
    optimizer.step()  # nothing has a gradient
    model.give_gradients(0)
    with pytest.raises(RuntimeError, match=rf"quantized parameter of shape \({SHAPE[0]}, {SHAPE[1]}\).*MasterWeights"):
        optimizer.step()
    for field, buffer in model.weight.storage.buffers.items():
        assert_bitwise(buffer, kept[field], field)
