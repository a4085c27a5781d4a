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
        param.grad = signed(*param.shape, seed=seed)
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
