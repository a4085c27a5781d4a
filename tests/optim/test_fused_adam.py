"""FusedAdam as an optimizer among others: its state is saved, copied and loaded, gradients come as they come."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from te_dist import optim
from te_dist.catalog import FORMATS
from te_dist.fsdp2 import QuantizedParameter
from te_dist.tensor import quantize
from te_dist.tensor.placement import local_tensor
from te_dist.testing import assert_bitwise, mesh, pool
from tests.tensor.samples import SHAPE, signed


def parameters(name: str = "float8_block_2d") -> list[nn.Parameter]:
    """A quantized and a plain parameter, both bf16."""
    weight = QuantizedParameter(quantize(signed(), FORMATS[name]).storage)
    return [nn.Parameter(weight), nn.Parameter(signed(SHAPE[0], seed=1))]


def step(optimizer: optim.FusedAdam, seed: int) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.grad = signed(*param.shape, seed=seed).to(param.dtype)
    optimizer.step()


def states(optimizer: optim.FusedAdam) -> list[dict[str, Tensor]]:
    return [optimizer.state[param] for param in optimizer.param_groups[0]["params"]]


def test_state_stays_fp32_when_it_is_loaded() -> None:
    params = parameters()
    first, second = (optim.FusedAdam(params, lr=0.1) for _ in range(2))
    step(first, 0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for got, want in zip(states(second), states(first), strict=True):
        assert got.keys() == want.keys()
        for key, value in got.items():
            assert_bitwise(value, want[key], key)


@pytest.mark.parametrize(
    "through", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
def test_a_copy_steps_as_the_original(through) -> None:
    original = optim.FusedAdam(parameters(), lr=0.1, adam_w_mode=False, weight_decay=0.1)
    step(original, 0)
    twin = through(original)
    for each in (original, twin):
        step(each, 1)
    for got, want in zip(states(twin), states(original), strict=True):
        assert_bitwise(got["master_param"], want["master_param"], "master of a copy")


@pytest.mark.parametrize("name", FORMATS)
def test_masters_begin_with_the_values_that_were_loaded(name: str) -> None:
    weight, _ = parameters(name)
    weight.storage.initial = signed()
    with torch.no_grad():
        weight.copy_(signed(seed=5))
    want = weight.dequantize(dtype=torch.float32)
    optimizer = optim.FusedAdam([weight])
    optimizer.initialize_state(weight)
    assert_bitwise(optimizer.state[weight]["master_param"], want, "master")


def sum_gradients(rank: int, world: int) -> None:
    """Under sequence parallelism the gradient of a replicated weight is a partial sum on every rank."""
    norm, alone = nn.LayerNorm(16), nn.LayerNorm(16)
    tp, x = mesh((world,), ("tp",)), torch.randn(8, 16)
    parallelize_module(norm, tp, SequenceParallel(sequence_dim=0))
    norm(DTensor.from_local(x.chunk(world)[rank], tp, [Shard(0)], run_check=False)).to_local().pow(3).sum().backward()
    alone(x).pow(3).sum().backward()
    for module in (norm, alone):
        optimizer = optim.FusedAdam(module.parameters(), betas=(0.0, 0.0))
        optimizer.step()
        module.gradients = [local_tensor(optimizer.state[p]["exp_avg"]) for p in module.parameters()]
    torch.testing.assert_close(norm.gradients, alone.gradients)


def test_partial_gradients_are_summed() -> None:
    pool(2).run(sum_gradients)


@pytest.mark.parametrize("name", FORMATS)
def test_values_written_between_steps_are_followed(name: str) -> None:
    (weight, _), want = parameters(name), signed(seed=7)
    optimizer = optim.FusedAdam([weight], lr=0.0)
    step(optimizer, 0)
    with torch.no_grad():
        weight.copy_(want)
    want = weight.dequantize(dtype=torch.float32)
    step(optimizer, 1)
    assert torch.equal(optimizer.state[weight]["master_param"], want)  # but for the sign of zeros


def test_masters_stay_when_averaged_weights_are_swapped_in_and_out() -> None:
    weight, _ = parameters()
    optimizer = optim.FusedAdam([weight], lr=0.1)
    step(optimizer, 0)
    master = optimizer.state[weight]["master_param"].clone()
    with torch.no_grad():
        average, kept = weight.detach().clone().mul_(0.5), weight.detach().clone()
        weight.copy_(average)
        weight.copy_(kept)
    optimizer.param_groups[0]["lr"] = 0.0
    step(optimizer, 1)
    assert_bitwise(optimizer.state[weight]["master_param"], master, "master")


def exchange_state(optimizer: optim.FusedAdam, weight: Tensor) -> None:
    optimizer.state[weight]["exp_avg"] = optimizer.state[weight]["exp_avg"].clone()


def move_state(optimizer: optim.FusedAdam, weight: Tensor) -> None:
    moment = optimizer.state[weight]["exp_avg_sq"]
    moment.data = moment.data.clone()


def exchange_buffers(optimizer: optim.FusedAdam, weight: Tensor) -> None:
    weight.storage.adopt(weight.detach().clone().storage)


def regroup(optimizer: optim.FusedAdam, weight: Tensor) -> None:
    (group,) = optimizer.param_groups
    optimizer.param_groups = [group | {"params": [param]} for param in group["params"]]
    optimizer.param_groups[1]["lr"] = 0.5


def leave_out(optimizer: optim.FusedAdam, weight: Tensor) -> None:
    for group in optimizer.param_groups:
        group["params"] = [weight]


@pytest.mark.parametrize("change", [exchange_state, move_state, exchange_buffers, regroup, leave_out])
def test_what_changes_between_steps_is_noticed(change) -> None:
    """A step that was prepared before the change does what one does that is prepared after it."""
    optimizers = [optim.FusedAdam(parameters(), lr=0.1) for _ in range(2)]
    for optimizer in optimizers:
        step(optimizer, 0)
        change(optimizer, optimizer.param_groups[0]["params"][0])
    optimizers[1] = copy.deepcopy(optimizers[1])
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = signed(*param.shape, seed=1)
        optimizer.step()
    for ours, theirs in zip(*(o.param_groups for o in optimizers), strict=True):
        for got, want in zip(ours["params"], theirs["params"], strict=True):
            for name, value in optimizers[0].state[got].items():
                assert_bitwise(value, optimizers[1].state[want][name], name)
            if isinstance(got, QuantizedParameter):
                for name, buffer in got.storage.buffers.items():
                    assert_bitwise(buffer, want.storage.buffers[name], name)


@pytest.mark.parametrize("name", FORMATS)
def test_parameters_are_their_masters_quantized(name: str) -> None:
    params = [QuantizedParameter(quantize(signed(*shape), FORMATS[name]).storage) for shape in (SHAPE, (272, 144))]
    optimizer = optim.FusedAdam([nn.Parameter(param) for param in params], lr=0.1)
    for seed in range(2):
        step(optimizer, seed)
    for param in optimizer.param_groups[0]["params"]:
        storage = param.storage
        want = storage.blank(storage.format)
        want.quantize_(optimizer.state[param]["master_param"])
        for field, buffer in storage.buffers.items():
            assert_bitwise(buffer, want.buffers[field], field)
