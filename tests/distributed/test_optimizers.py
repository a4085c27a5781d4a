"""Optimizers over sharded masters: the bytes of the unsharded model, and one reduction a step."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from te_dist import fsdp2, grouped, optim
from te_dist.fsdp2 import GroupedParameter
from te_dist.tensor import QuantizedTensor, placement
from te_dist.tensor.placement import local_tensor
from te_dist.testing import assert_bitwise, mesh, pool
from tests.distributed.probe import FORMATS, Layer, random_matrix, wires

COLS = 160
NAMES = ["float8_tensorwise", "float8_block_2d", "mxfp8_1d", "nvfp4_2d", "nvfp4_row_scaled", "high_precision"]
WRAPPED = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "AdamW, loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}
BF16, BYTES = torch.bfloat16, torch.uint8
FUSED = {
    "moments in bytes": {"exp_avg_dtype": BYTES, "exp_avg_sq_dtype": BYTES, "store_param_remainders": True},
    "bf16 moments and masters": {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16, "master_weight_dtype": BF16},
    "no masters": {"master_weights": False, "stochastic_rounding": True, "exp_avg_sq_dtype": BYTES},
}


def make(kind: str, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if kind in WRAPPED:
        return optim.MasterWeights(params, WRAPPED[kind])
    return optim.FusedAdam(params, lr=0.1, **FUSED[kind])


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
    optimizers = [make(kind, each.parameters()) for each in (alone, parts)]
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


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [*WRAPPED, *FUSED])
@pytest.mark.parametrize(("world", "rows"), [(2, 208), (3, 208)])
def test_shards_are_parts_of_the_unsharded_model(world: int, rows: int, kind: str) -> None:
    assert pool(world).run(compare, rows, kind) == [1] * world


def update_cut(rank: int, world: int, shape: torch.Size, placements: list[Shard], kind: str) -> None:
    """Plain parameters that are cut between columns, or both ways."""
    grid = mesh((world,), ("tp",)) if len(placements) == 1 else mesh((2, world // 2), ("dp", "tp"))
    whole = random_matrix(shape[0], shape[1:].numel(), 1).view(shape).bfloat16()
    alone = nn.Parameter(whole.clone())
    param = nn.Parameter(distribute_tensor(whole, grid, placements))
    optimizers = [make(kind, [alone]), make(kind, [param])]
    for turn in range(2):
        alone.grad = random_matrix(shape[0], whole[0].numel(), 2 + turn).view(shape).bfloat16()
        param.grad = distribute_tensor(alone.grad, grid, placements)
        for optimizer in optimizers:
            optimizer.step()
    assert_bitwise(local_tensor(param).detach(), placement.local_part(alone.detach(), param), "parameter")
    for key, value in optimizers[0].state[alone].items():
        part = placement.local_part(value, param) if value.dim() else value
        assert_bitwise(local_tensor(optimizers[1].state[param][key]), part.contiguous(), key)


CUTS = [
    (2, (6, 512), [Shard(1)]),
    (3, (7, 640 + 128), [Shard(1)]),
    (4, (7, 512), [Shard(0), Shard(1)]),
    (4, (7, 60), [Shard(0), Shard(0)]),
    (2, (3, 10, 128), [Shard(1)]),
]


@pytest.mark.each_value
@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize(("world", "shape", "placements"), CUTS, ids=str)
def test_cuts_anywhere_change_nothing(world: int, shape: tuple[int, ...], placements: list[Shard], kind: str) -> None:
    pool(world).run(update_cut, torch.Size(shape), placements, kind)


def refuse_cut(rank: int, world: int) -> None:
    param = nn.Parameter(distribute_tensor(torch.zeros(4, 320), mesh((world,), ("tp",)), [Shard(1)]))
    with pytest.raises(ValueError, match=r"cut into 160 columns, wanted a multiple of 128"):
        optim.FusedAdam([param], exp_avg_dtype=BYTES)


def test_a_cut_through_a_block_of_moments_is_refused() -> None:
    pool(2).run(refuse_cut)


def step_with_what_was_sharded(rank: int, world: int) -> None:
    layers = nn.Sequential(nn.Linear(COLS, COLS), nn.Linear(COLS, COLS))
    fsdp2.fully_shard(layers[0], mesh=mesh((world,), ("dp",)))
    optimizer = optim.FusedAdam(layers.parameters(), lr=0.1)
    for unit in (layers[1], layers):
        fsdp2.fully_shard(unit, mesh=mesh((world,), ("dp",)))
    layers(random_matrix(4, COLS, 1)).sum().backward()
    with pytest.raises(
        RuntimeError,
        match=r"FusedAdam holds 2 weights that fully_shard .*, weight of Linear, bias of Linear, and would",
    ):
        optimizer.step()
    optim.FusedAdam(layers.parameters(), lr=0.1).step()


def test_an_optimizer_that_was_made_while_units_were_wrapped_refuses_to_step() -> None:
    pool(2).run(step_with_what_was_sharded)


def go_on_from_whole_state(rank: int, world: int, kind: str, optimizer_first: bool) -> None:
    """torch's helpers gather the state of all ranks, and hand it out again; `set_state_dict` that of the optimizer
    first."""
    pair, options = [], StateDictOptions(full_state_dict=True, cpu_offload=True)
    for seed in range(2):
        layers = model(208)
        for layer in layers.values():
            fsdp2.fully_shard(layer, mesh=mesh((world,), ("dp",)))
        pair.append((layers, make(kind, layers.parameters())))
        give_gradients(layers, seed)
        pair[-1][1].step()
    (layers, optimizer), (other, its) = pair
    whole = get_optimizer_state_dict(layers, optimizer, options=options)
    if rank == 0:
        assert whole["state"]["bf16.weight"]["exp_avg"].shape == (5, COLS)
    optimizer.zero_grad(), its.zero_grad()
    handed_out = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if not optimizer_first:
        other.load_state_dict(layers.state_dict())
    set_optimizer_state_dict(other, its, whole if rank == 0 else {}, options=handed_out)
    if optimizer_first:
        other.load_state_dict(layers.state_dict())
    for each, own in pair:
        give_gradients(each, 5)
        own.step()
    for (name, param), twin in zip(layers.named_parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[param].items():
            assert_bitwise(local_tensor(its.state[twin][key]), local_tensor(value), f"{key} of {name}")


@pytest.mark.each_value
@pytest.mark.parametrize("optimizer_first", [False, True])
@pytest.mark.parametrize("kind", ["AdamW, foreach", "moments in bytes", "bf16 moments and masters"])
def test_training_goes_on_from_the_whole_state(kind: str, optimizer_first: bool) -> None:
    pool(2).run(go_on_from_whole_state, kind, optimizer_first)


def update_matrices(rank: int, world: int) -> float:
    """An optimizer that looks at whole matrices, over shards; how far masters are from those of the unsharded ones."""
    names, made = ["float8_tensorwise", "float8_block_2d"], []
    for is_sharded in (False, True):
        layers = nn.ModuleDict({n: Layer(FORMATS[n], random_matrix(208, COLS, i)) for i, n in enumerate(names)})
        for layer in layers.values() if is_sharded else ():
            fsdp2.fully_shard(layer, mesh=mesh((world,), ("dp",)))
        optimizer = optim.MasterWeights(layers.parameters(), lambda own: torch.optim.Muon(own, lr=0.1))
        for turn in range(2):
            give_gradients(layers, turn)
            optimizer.step()
        made.append([optimizer.state[param]["master_param"] for param in layers.parameters()])
    return max(((b.full_tensor() - a).norm() / a.norm()).item() for a, b in zip(*made, strict=True))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs a torch with Muon")
def test_optimizers_of_whole_matrices_go_over_shards() -> None:
    assert max(pool(2).run(update_matrices)) < 1e-3
