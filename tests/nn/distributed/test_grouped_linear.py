"""GroupedLinear under FSDP2: what ranks compute together is, bit for bit, what one computes alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import te_dist as te
from te_dist import fsdp2, optim, recipe
from te_dist.testing import assert_bitwise, mesh, pool

GROUPS, IN, OUT = 4, 128, 256
SIZES = [9, 0, 130, 20]
RECIPES = {
    "block": recipe.Float8BlockScaling(),
    "current": recipe.Float8CurrentScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(rank: int, world: int, name: str, single: bool, dim: int) -> None:
    """Steps of an optimizer, sharded and alone, on inputs that are the same on every rank."""
    made_by, modules = RECIPES[name], []
    for _ in range(2):
        torch.manual_seed(0)
        with te.quantized_model_init(recipe=made_by):
            modules.append(te.GroupedLinear(GROUPS, IN, OUT, single_grouped_weight=single, single_grouped_bias=single))
    sharded, alone = modules
    place = (lambda param: Shard(dim) if param.dim() == 3 else Shard(0)) if single else None
    fsdp2.fully_shard(sharded, mesh=mesh((world,), ("dp",)), shard_placement_fn=place)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    optimizers = [optim.FusedAdam(module.parameters(), lr=0.05) for module in modules]
    for step in range(3):
        results = []
        for module, optimizer in zip(modules, optimizers, strict=True):
            x = normal(sum(SIZES), IN, seed=step).requires_grad_()
            with te.autocast(recipe=made_by):
                out = module(x, torch.tensor(SIZES))
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append((out.detach(), x.grad))
        for what, got, want in zip(("y", "dx"), *results, strict=True):
            assert_bitwise(got, want, f"{what} of step {step}")


@pytest.mark.each_value
@pytest.mark.parametrize(("single", "dim"), [(True, 0), (True, 1), (False, 0)])
@pytest.mark.parametrize("name", RECIPES)
def test_sharded_groups_train_as_those_of_one_rank(name: str, single: bool, dim: int) -> None:
    pool(2).run(train, name, single, dim)


def refuse(rank: int, world: int, option: str, single: bool) -> None:
    """te_dist's `fully_shard` refuses at once, torch's leaves it to the first pass."""
    make = partial(te.GroupedLinear, GROUPS, IN, OUT, single_grouped_weight=single, **{option: True})
    over = mesh((world,), ("dp",))
    with pytest.raises(ValueError, match=option):
        fsdp2.fully_shard(torch.nn.Sequential(make()), mesh=over)
    module = fully_shard(make(), mesh=over)
    with pytest.raises(ValueError, match=f"gathered by FSDP2, under which {option}"):
        module(normal(sum(SIZES), IN, seed=0), SIZES)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("option", ["delay_wgrad_compute", "fuse_wgrad_accumulation"])
def test_gradients_that_bypass_autograd_are_refused(option: str, single: bool) -> None:
    pool(2).run(refuse, option, single)


def keep(rank: int, world: int, dims: int) -> None:
    """With plain weights; quantized ones are not kept. Of two dimensions, one is of groups and one of FSDP2."""
    shape, names = ((world,), ("dp",)) if dims == 1 else ((1, world), ("ep", "dp"))
    over = mesh(shape, names)
    module = te.GroupedLinear(GROUPS, IN, OUT, bias=False, single_grouped_weight=True)
    if dims > 1:
        module.weight = torch.nn.Parameter(distribute_tensor(module.weight.data, over["ep"], [Shard(0)]))
    module = fully_shard(module, mesh=over["dp"])
    with te.autocast(recipe=RECIPES["block"]), pytest.raises(ValueError, match="is_first_microbatch"):
        module(normal(sum(SIZES), IN, seed=0), SIZES, is_first_microbatch=True)


@pytest.mark.parametrize("dims", [1, 2])
def test_gathered_weights_are_not_kept(dims: int) -> None:
    pool(2).run(keep, dims)
