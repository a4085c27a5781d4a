"""Clipping gradients that lie on several meshes: the unsharded norm, the same number on every rank."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from te_dist import fsdp2, optim
from te_dist.fsdp2 import QuantizedParameter
from te_dist.tensor import placement, quantize
from te_dist.testing import assert_bitwise, mesh, pool
from tests.distributed.probe import FORMATS, random_matrix

LIMIT = 0.5


class Model(nn.Module):
    """Linear maps for both ways of tensor parallelism, a quantized weight, rows fewer than ranks, experts, a scalar."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.column, self.row = nn.Linear(24, 40, dtype=dtype), nn.Linear(40, 24, dtype=dtype)
        self.quantized = nn.Module()
        nominal = torch.float32 if dtype == torch.float64 else dtype
        values = quantize(random_matrix(72, 32, 0).to(nominal), FORMATS["float8_tensorwise"])
        self.quantized.weight = nn.Parameter(QuantizedParameter(values.storage))
        self.short = nn.Linear(1, 1, dtype=dtype)
        self.experts = nn.Parameter(torch.zeros(4, 8, 8, dtype=dtype))
        self.norm = nn.Parameter(torch.zeros(24, dtype=dtype))
        self.plain = nn.Parameter(torch.zeros((), dtype=dtype))


def whole_gradients(model: Model) -> dict[str, Tensor]:
    return {
        name: random_matrix(param.shape.numel(), 1, seed).view(param.shape).to(param.dtype)
        for seed, (name, param) in enumerate(model.named_parameters())
    }


def on_meshes(model: Model) -> None:
    """(dp, tp), FSDP2 inside of tp; experts over a mesh of their own; the others over dp, or nowhere."""
    data, tensor = (mesh((2, 2), ("dp", "tp"))[name] for name in ("dp", "tp"))
    parallelize_module(model, tensor, {"column": ColwiseParallel(), "row": RowwiseParallel()})
    for module in (model.column, model.row, model.short):
        torch_fully_shard(module, mesh=data)
    fsdp2.fully_shard(model.quantized, mesh=mesh((4,), ("all",)))
    experts = mesh((4,), ("ep",))
    model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), experts, [Shard(0)]))
    model.norm = nn.Parameter(distribute_tensor(model.norm.detach(), tensor, [Replicate()]))


def on_one(model: Model, world: int) -> None:
    """FSDP2 over all ranks."""
    for module in (model.column, model.row, model.quantized, model.short):
        fsdp2.fully_shard(module, mesh=mesh((world,), ("dp",)))


def give(model: Model, grads: dict[str, Tensor]) -> None:
    """To each rank its part; to `norm` what ranks have yet to sum."""
    for name, param in model.named_parameters():
        grad = grads[name]
        if isinstance(param, DTensor):
            local = param.to_local()
            grad = _part(grad, param)
            if name == "norm":
                own = grad / 4 if param.device_mesh.get_local_rank() else grad * 3 / 4
                grad = DTensor.from_local(own, param.device_mesh, [Partial()], run_check=False)
            else:
                assert grad.shape == local.shape
                grad = DTensor.from_local(
                    grad, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
                )
        param.grad = grad.clone()


def _part(whole: Tensor, param: DTensor) -> Tensor:
    return placement.local_part(whole, param).contiguous()


def compare(rank: int, world: int, layout: str, order: float, dtype: torch.dtype) -> Tensor:
    alone, model = Model(dtype), Model(dtype)
    on_meshes(model) if layout == "meshes" else on_one(model, world)
    grads = whole_gradients(alone)
    for name, param in alone.named_parameters():
        param.grad = grads[name].clone()
    give(model, grads)
    want = optim.clip_grad_norm_(alone.parameters(), LIMIT, order)
    got = optim.clip_grad_norm_(model.parameters(), LIMIT, order)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    coefficient = torch.clamp(LIMIT / (got + 1e-6), max=1.0)
    assert coefficient < 0.5
    for name, param in model.named_parameters():
        if name != "norm" or layout != "meshes":
            part = _part(grads[name], param) if isinstance(param, DTensor) else grads[name]
            grad = param.grad.to_local() if isinstance(param, DTensor) else param.grad
            assert_bitwise(grad, part.mul_(coefficient), name)
    return got


ORDERS = [
    (2.0, torch.float32),
    (2.0, torch.bfloat16),
    (1.0, torch.float64),
    (3.0, torch.float32),
    (math.inf, torch.float32),
]


@pytest.mark.parametrize(("order", "dtype"), ORDERS)
@pytest.mark.parametrize(("layout", "world"), [("meshes", 4), ("one", 2), ("one", 3)])
def test_the_norm_is_that_of_the_unsharded_model(layout: str, world: int, order: float, dtype: torch.dtype) -> None:
    first, *others = pool(world).run(compare, layout, order, dtype)
    for other in others:
        assert_bitwise(other, first, "norm on another rank")


def clip_stages(rank: int, world: int, value: float) -> tuple[Tensor, int]:
    """Every rank has parameters of its own; the first one's may be infinite."""
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0 + rank, value if rank == 0 else 0.0])
    calls, original = [], dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(1), original(*args, **kwargs))[1]
    try:
        if math.isinf(value):
            with pytest.raises(RuntimeError, match="inf"):
                optim.clip_grad_norm_(param, 1.0, error_if_nonfinite=True, pp_group=dist.group.WORLD)
        total = optim.clip_grad_norm_(param, 1.0, pp_group=dist.group.WORLD)
    finally:
        dist.all_reduce = original
    return total, len(calls)


def test_norms_of_stages_are_put_together() -> None:
    for total, calls in pool(2).run(clip_stages, 0.0):
        assert total == 5
        assert calls == 1


def test_every_rank_raises_where_one_gradient_is_infinite() -> None:
    for total, _ in pool(2).run(clip_stages, math.inf):
        assert torch.isinf(total)


def clip_a_nan(rank: int, world: int, where: int) -> None:
    """The largest magnitude of stages, and of shards."""
    whole = torch.ones(world, 2)
    whole[where, 1] = math.nan
    stage = nn.Parameter(torch.zeros(2))
    shards = nn.Parameter(distribute_tensor(torch.zeros(world, 2), mesh((world,), ("dp",)), [Shard(0)]))
    stage.grad = whole[rank].clone()
    shards.grad = distribute_tensor(whole, shards.device_mesh, [Shard(0)])
    assert optim.clip_grad_norm_(stage, 1.0, math.inf, pp_group=dist.group.WORLD).isnan(), rank
    assert optim.clip_grad_norm_(shards, 1.0, math.inf).isnan(), rank
    stage.grad = torch.full((2,), math.inf if rank == where else 3.0)
    assert optim.clip_grad_norm_(stage, 1.0, math.inf, pp_group=dist.group.WORLD) == math.inf


@pytest.mark.parametrize("where", range(3))
def test_a_nan_of_one_rank_is_one_on_all(where: int) -> None:
    pool(3).run(clip_a_nan, where)


def clip_without(rank: int, world: int, order: float, dtype: torch.dtype) -> None:
    """Ranks 0 and 1 have no gradient of one parameter each, spread over groups of their own; nobody of the last."""
    grid = mesh((2, 2), ("dp", "tp"))
    line = mesh((4,), ("all",))
    over = [(grid["dp"], [Shard(0)]), (grid["tp"], [Shard(0)]), (grid, [Shard(0), Shard(1)]), (line, [Shard(0)])]
    params = [nn.Parameter(distribute_tensor(torch.zeros(4, 4, dtype=dtype), *place)) for place in over]
    whole = torch.zeros(4, 4, dtype=dtype)
    for index, param in enumerate(params[:3]):
        if rank != index:
            param.grad = distribute_tensor(whole, *over[index], src_data_rank=None)
            param.grad.to_local().fill_(index + 1)
    calls, original = [], dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(args[0].dtype), original(*args, **kwargs))[1]
    try:
        optim.clip_grad_norm_(params, 1e9, order)
    finally:
        dist.all_reduce = original
    assert calls == [dtype] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_rank_without_gradients_takes_part(order: float, dtype: torch.dtype) -> None:
    pool(4).run(clip_without, order, dtype)
