"""Optimizers of torch over sharded masters: the bytes of the unsharded model, and one reduction a step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from te_dist import fsdp2, grouped, optim
from te_dist.fsdp2 import GroupedParameter
from te_dist.tensor import QuantizedTensor, placement
from te_dist.tensor.placement import local_tensor
from te_dist.testing import assert_bitwise, mesh, pool
from tests.distributed.probe import FORMATS, Layer, random_matrix, wires

COLS = 160
NAMES = ["float8_tensorwise", "float8_block_2d", "mxfp8_1d", "nvfp4_2d", "nvfp4_row_scaled", "high_precision"]
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "AdamW, loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def model(rows: int) -> nn.ModuleDict:
    layers = nn.ModuleDict({name: Layer(FORMATS[name], random_matrix(rows, COLS, i)) for i, name in enumerate(NAMES)})
    layers["bf16"] = nn.Linear(COLS, 5, dtype=torch.bfloat16)
    nn.init.zeros_(layers["bf16"].weight), nn.init.zeros_(layers["bf16"].bias)
    layers["experts"] = nn.Module()
    experts = grouped.quantize(random_matrix(3 * 96, COLS, 20).view(3, 96, COLS), FORMATS["float8_block_2d"])
    layers["experts"].weight = nn.Parameter(GroupedParameter(experts.storage))
    return layers


def give_gradients(layers: nn.ModuleDict, turn: int) -> None:
    for seed, param in enumerate(layers.parameters()):
        whole = random_matrix(param.shape[0], param.shape.numel() // param.shape[0], 100 * turn + seed).to(param.dtype)
        whole = whole.view(param.shape)
        is_sharded = local_tensor(param) is not param
        param.grad = sharded(placement.local_part(whole, param), param) if is_sharded else whole


def sharded(local: Tensor, like: DTensor) -> DTensor:
    place = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local.contiguous(), like.device_mesh, like.placements, run_check=False, **place)


def compare(rank: int, world: int, rows: int, kind: str) -> int:
    alone, parts = model(rows), model(rows)
    for layer in parts.values():
        fsdp2.fully_shard(layer, mesh=mesh((world,), ("dp",)))
    optimizers = [optim.MasterWeights(each.parameters(), OPTIMIZERS[kind]) for each in (alone, parts)]
    calls, original = [], dist.all_reduce
    for turn in range(2):
        for each in (alone, parts):
            give_gradients(each, turn)
        optimizers[0].step()
        calls.clear()
        dist.all_reduce = lambda *args, **kwargs: (calls.append(1), original(*args, **kwargs))[1]
        try:
            optimizers[1].step()
        finally:
            dist.all_reduce = original
    for (name, own), whole in zip(parts.named_parameters(), alone.parameters(), strict=True):
        for key, value in optimizers[0].state[whole].items():
            part = placement.local_part(value, own) if value.dim() else value
            assert_bitwise(local_tensor(optimizers[1].state[own][key]), part, f"{key} of {name}")
        local = local_tensor(own)
        if not isinstance(local, QuantizedTensor):
            assert_bitwise(local.detach(), placement.local_part(whole.detach(), own), name)
        elif name != "experts.weight":
            region = local.storage.region.rows
            want = wires(whole.storage.narrow(0, region.start, len(region)))
            for field, wire in wires(local).items():
                assert_bitwise(wire, want[field], f"{field} of {name}")
        else:
            first = grouped.first_member(own)
            for index, member in enumerate(local.members):
                for field, wire in wires(member).items():
                    assert_bitwise(wire, wires(whole.members[first + index])[field], f"{field} of expert {index}")
    return len(calls)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("world", "rows"), [(2, 208), (3, 208)])
def test_shards_are_parts_of_the_unsharded_model(world: int, rows: int, kind: str) -> None:
    assert pool(world).run(compare, rows, kind) == [1] * world
