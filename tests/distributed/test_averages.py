"""Norms in a log line and averages of weights, over sharded quantized parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from te_dist import checkpoints, fsdp2, optim
from te_dist.tensor import QuantizedTensor, quantize
from te_dist.tensor.placement import local_part, local_tensor
from te_dist.tensor_parallel.cutting import cut_parameter
from te_dist.testing import assert_bitwise, device, mesh
from tests.distributed.probe import FORMATS, Layer, assert_seen, fits, random_matrix, wires

ROWS, COLS, DECAY = 192, 160, 0.875


def layer(name: str, seed: int) -> Layer:
    return Layer(FORMATS[name], random_matrix(ROWS, COLS, seed).to(device()), device=device())


def log_norms(rank: int, world: int, name: str) -> None:
    """On a 2-D mesh, weights cut by tensor parallelism first: norms are those of the whole."""
    grid = mesh((2, 2), ("dp", "tp"))
    module = layer(name, 0)
    whole = module.weight.dequantize(dtype=torch.float32).double()
    if not (ROWS // 2 % FORMATS[name].alignment(0)):
        module.weight = cut_parameter(module.weight, grid["tp"], dim=0, name="weight")
    fsdp2.fully_shard(module, mesh=grid["dp"])
    assert isinstance(module.weight, DTensor)
    for order, want in ((2, whole.norm()), (torch.inf, whole.abs().max()), (1, whole.abs().sum())):
        got = nn.utils.get_total_norm([module.weight], norm_type=order)
        assert isinstance(got, DTensor)
        assert abs(got.full_tensor().double() / want - 1) < 1e-5
    assert abs(module.weight.norm().full_tensor().double() / whole.norm() - 1) < 1e-5
    assert abs(module.weight.detach().abs().max().full_tensor().double() - whole.abs().max()) < 1e-5 * whole.abs().max()
    assert abs(module.weight.detach().mean().full_tensor().double() - whole.mean()) < 1e-5 * whole.abs().mean()
    assert isinstance(local_tensor(module.weight), QuantizedTensor)


@pytest.mark.parametrize("name", FORMATS)
def test_norms_of_weights_on_a_mesh_of_two_dimensions(name: str, ranks) -> None:
    ranks(4).run(log_norms, name)


def average_states(rank: int, world: int, name: str) -> None:
    """An average kept by state dict in high precision, swapped in for evaluation."""
    module = layer(name, 0)
    fsdp2.fully_shard(module, mesh=mesh((world,), ("dp",)))
    average = {key: value.detach() * 1.0 for key, value in module.state_dict().items()}
    assert not any(isinstance(local_tensor(value), QuantizedTensor) for value in average.values())
    want = quantize(random_matrix(ROWS, COLS, 0).to(device()), FORMATS[name]).dequantize()
    for seed in (1, 2):
        values = quantize(random_matrix(ROWS, COLS, seed).to(device()), FORMATS[name])
        with torch.no_grad():
            local_tensor(module.weight).copy_(local_part(random_matrix(ROWS, COLS, seed).to(device()), module.weight))
        fsdp2.settle(module)
        for key, value in module.state_dict().items():
            average[key].lerp_(value, 1 - DECAY)
        want.lerp_(values.dequantize(), 1 - DECAY)
    assert_bitwise(average["weight"].full_tensor(), want, "average")
    kept = {key: value.detach().clone() for key, value in module.state_dict().items()}
    bytes_before = wires(local_tensor(module.weight))
    module.load_state_dict(average)
    module(random_matrix(4, COLS, 1).to(device()))
    assert_seen(module, want, backward=False)
    module.load_state_dict(kept)
    fsdp2.settle(module)
    for field, wire in wires(local_tensor(module.weight)).items():
        assert_bitwise(wire, bytes_before[field], field)


@pytest.mark.parametrize("name", FORMATS)
def test_an_average_by_state_dict(name: str, ranks) -> None:
    if not fits(FORMATS[name], ROWS, 2):
        pytest.fail(f"choose rows that {name} can be cut into")
    ranks(2).run(average_states, name)


class Plain(nn.Module):
    """The values of a module's parameters, which averages are kept in."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, param in module.named_parameters():
            self.register_parameter(name, nn.Parameter(param.detach() * 1.0))


def average_models(rank: int, world: int, name: str) -> None:
    module = layer(name, 0)
    fsdp2.fully_shard(module, mesh=mesh((world,), ("dp",)))
    average = AveragedModel(Plain(module), multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    want = module.weight.full_tensor().dequantize()
    for seed in (1, 2):
        with torch.no_grad():
            local_tensor(module.weight).copy_(local_part(random_matrix(ROWS, COLS, seed).to(device()), module.weight))
        fsdp2.settle(module)
        average.update_parameters(module)
        if seed > 1:
            want.lerp_(module.weight.full_tensor().dequantize(), 1 - DECAY)
        else:
            want = module.weight.full_tensor().dequantize()  # the first one is copied
    assert_bitwise(average.module.weight.full_tensor().detach(), want, "average")
    assert isinstance(local_tensor(module.weight), QuantizedTensor)


@pytest.mark.parametrize("name", ["float8_tensorwise", "float8_block_2d", "mxfp8_1d", "nvfp4_2d", "high_precision"])
def test_a_model_of_averages(name: str, ranks) -> None:
    ranks(2).run(average_models, name)


def master_of(optimizer: optim.FusedAdam) -> torch.Tensor:
    (weight,) = optimizer.param_groups[0]["params"]
    return optimizer.state[weight]["master_param"].full_tensor()


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    local = local_tensor(tensor)
    return local.dequantize() if isinstance(local, QuantizedTensor) else local


def save_averages(rank: int, world: int, path: Path) -> None:
    """One checkpoint of both, and an export of the average, as docs/checkpoints.md has it."""
    names, made = ("model", "average"), []
    for seed in (0, 1):
        module = fsdp2.fully_shard(layer("float8_block_2d", seed), mesh=mesh((world,), ("dp",)))
        average = AveragedModel(Plain(module), multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        optimizer = optim.FusedAdam(module.parameters(), lr=1e-2)
        made.append((nn.ModuleDict(dict(zip(names, (module, average), strict=True))), optimizer))
    (both, optimizer), (others, other_optimizer) = made
    for seed in (2, 3):
        both["model"](random_matrix(4, COLS, seed).to(device())).square().mean().backward()
        optimizer.step()
        both["average"].update_parameters(both["model"])
    checkpoints.save(path / "c", model=both, optimizer=optimizer)
    checkpoints.load(path / "c", model=others, optimizer=other_optimizer)
    for (name, want), got in zip(both.state_dict().items(), others.state_dict().values(), strict=True):
        assert_bitwise(values_of(got), values_of(want), name)
    assert_bitwise(master_of(other_optimizer), master_of(optimizer), "master")
    average = both["average"].module.weight.detach()
    both["model"].load_state_dict({"weight": average})
    with pytest.raises(checkpoints.CheckpointError, match=r"call fsdp2.settle\(model\)"):
        checkpoints.high_precision_state_dict(both["model"], optimizer=optimizer)
    fsdp2.settle(both["model"])
    given = checkpoints.high_precision_state_dict(both["model"], optimizer=optimizer)
    want = quantize(average.full_tensor(), FORMATS["float8_block_2d"]).dequantize()
    if rank == 0:
        assert_bitwise(given["weight"], want.cpu(), "exported average")


def test_an_average_is_saved_beside_its_model(ranks, tmp_path: Path) -> None:
    ranks(2).run(save_averages, tmp_path)
