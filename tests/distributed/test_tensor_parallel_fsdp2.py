"""Tensor and sequence parallelism on one dimension of a mesh, FSDP2 on the other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from te_dist import fsdp2, testing
from te_dist.fsdp2.ahead import kernels_of
from te_dist.recipe import Recipe
from te_dist.tensor import QuantizedTensor
from te_dist.tensor.placement import local_tensor
from te_dist.tensor.traffic import Traffic
from tests.distributed.test_tensor_parallel import (
    BATCH,
    PLANS,
    RECIPES,
    SEQUENCE,
    SEQUENCE_PARALLEL,
    K,
    assert_canonical,
    assert_near,
    autocast,
    make_layer,
    normal,
    run,
)


def check_two_dimensions(rank: int, world: int, recipe_name: str) -> None:
    recipe, over = RECIPES[recipe_name], testing.mesh((2, 2), ("dp", "tp"))
    want, got = (make_layer(recipe, quantized=True) for _ in range(2))
    parallelize_module(got, over["tp"], {name: style() for name, style in SEQUENCE_PARALLEL.items()})
    fsdp2.fully_shard(got, mesh=over["dp"])
    dp, tp = over.get_local_rank("dp"), over.get_local_rank("tp")
    x, grad = (normal(2, BATCH, SEQUENCE, K, seed=seed) for seed in (1, 2))
    outputs = []
    for i in range(2):
        outputs.append(run(want, x[i], grad[i], autocast(recipe, dist.group.WORLD)))
    parts = (t[dp].chunk(2, 1)[tp] for t in (x, grad))
    output, input_gradient = run(got, *parts, autocast(recipe, dist.group.WORLD))
    assert_near(output, outputs[dp][0].chunk(2, 1)[tp], "output")
    assert_near(input_gradient, outputs[dp][1].chunk(2, 1)[tp], "input gradient")
    for (name, a), (_, b) in zip(got.named_parameters(), want.named_parameters(), strict=True):
        assert_near(testing.full_tensor(a.grad), b.grad / 2, name)


@pytest.mark.every_run(recipe=("none", "current", "mx"))
@pytest.mark.parametrize("recipe", ["none", "current", "block", "mx", "nv"])
def test_two_dimensional_meshes_compute_what_one_process_does(ranks, recipe):
    ranks(4).run(check_two_dimensions, recipe)


def check_rehearsal(rank: int, world: int, recipe_name: str, plan: str) -> int:
    over = testing.mesh((world,), ("tp",))
    layer = make_layer(RECIPES[recipe_name], quantized=True)
    parallelize_module(layer, over, {name: style() for name, style in PLANS[plan].items()})
    with Traffic() as traffic:
        kernels = kernels_of(layer)
    assert not traffic.sent
    return len(kernels)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("recipe", ["current", "block", "nv", "hybrid"])
def test_kernels_of_parts_are_known_before_they_run_and_nothing_is_sent(ranks, recipe, plan):
    assert min(ranks(2).run(check_rehearsal, recipe, plan)) > 5


def trained(layer: nn.Module, recipe: Recipe | None, parts, steps: int) -> list[float]:
    """Losses of this rank while Adam fits a fixed batch."""
    optimizer = te.optim.FusedAdam(layer.parameters(), lr=2e-3, master_weights=True)
    losses = []
    for _ in range(steps):
        x, target = parts
        with autocast(recipe, dist.group.WORLD):
            loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_training(rank: int, world: int, recipe_name: str) -> None:
    """Both models start from `materialize`, which makes the same weights for every mesh."""
    recipe, over = RECIPES[recipe_name], testing.mesh((2, 2), ("dp", "tp"))
    want, got = (make_layer(recipe, quantized=True) for _ in range(2))
    parallelize_module(got, over["tp"], {name: style() for name, style in SEQUENCE_PARALLEL.items()})
    fsdp2.fully_shard(got, mesh=over["dp"])
    for layer in (want, got):
        fsdp2.materialize(layer, device=testing.device(), seed=3)
    for (name, a), (_, b) in zip(got.named_parameters(), want.named_parameters(), strict=True):
        local = local_tensor(a)
        if isinstance(local, QuantizedTensor):
            region = local.storage.region
            rows = b.storage.narrow(0, region.rows.start, len(region.rows))
            assert_canonical(local.storage, rows.narrow(1, region.cols.start, len(region.cols)), name)
    x, target = (normal(BATCH, SEQUENCE, K, seed=seed) for seed in (4, 5))
    tp = over.get_local_rank("tp")
    losses = torch.tensor(trained(got, recipe, [t.chunk(2, 1)[tp] for t in (x, target)], 6), device=x.device)
    dist.all_reduce(losses, group=over["tp"].get_group())
    wanted = torch.tensor(trained(want, recipe, (x, target), 6), device=x.device)
    torch.testing.assert_close(losses / 2, wanted, rtol=2e-3, atol=0)
    assert wanted[-1] < 0.8 * wanted[0]


@pytest.mark.every_run(recipe=("block", "nv"))
@pytest.mark.parametrize("recipe", ["none", "current", "block", "mx", "nv"])
def test_training_on_a_two_dimensional_mesh_follows_one_process(ranks, recipe):
    ranks(4).run(check_training, recipe)
