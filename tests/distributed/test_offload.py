"""Offloading and recomputation in sharded models: no bit changes, and no gathered weight is ever copied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from te_dist import fsdp2, offload, testing
from te_dist.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe
from te_dist.tensor_parallel import ColumnParallel, RowParallel
from te_dist.testing import assert_bitwise

pytestmark = pytest.mark.gloo_only("its inputs are made on the CPU")

ROWS, WIDTH = 32, 128
RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mx": MXFP8BlockScaling(),
    "nv": NVFP4BlockScaling(),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


class Block(nn.Module):
    """Linear maps of te_dist's and of torch's own, whose transposed weight autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = te.Linear(WIDTH, 2 * WIDTH), te.Linear(2 * WIDTH, WIDTH)
        self.plain = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.plain(self.down(torch.relu(self.up(x))))


def make_blocks(recipe: Recipe | None) -> nn.ModuleList:
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        return nn.ModuleList(Block() for _ in range(2))


def step(blocks: nn.ModuleList, recipe: Recipe | None, x: Tensor, *, recompute: bool = False) -> list[Tensor]:
    """Output, and gradients of this rank's parts; run inside of whatever context is under test."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = 2 * x  # a leaf would stay where it is
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        for block in blocks:
            y = te.checkpoint(block, y) if recompute else block(y)
    y.square().mean().backward()
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in blocks.parameters()]
    for param in blocks.parameters():
        param.grad = None
    return [y.detach(), x.grad, *grads]


def check(blocks: nn.ModuleList, recipe: Recipe | None, x: Tensor) -> int:
    """Compares all ways to save activations; gives the bytes that offloading parked."""
    want = step(blocks, recipe, x)
    with offload.activations(min_bytes=0) as alone:
        runs = [step(blocks, recipe, x)]
    with offload.activations(min_bytes=0) as together:
        runs.append(step(blocks, recipe, x, recompute=True))
    runs.append(step(blocks, recipe, x, recompute=True))
    for run in runs:
        for index, (a, b) in enumerate(zip(run, want, strict=True)):
            assert_bitwise(a, b, f"result {index}")
    assert alone.live == together.live == 0
    assert together.parked == 2 * x.nbytes + x.nbytes, "more than inputs of blocks and the output was parked"
    assert alone.parked <= len(blocks) * 8 * x.nbytes, "more than the activations of the blocks was parked"
    return alone.parked


def check_fsdp2(rank: int, world: int, name: str) -> None:
    recipe, over = RECIPES[name], testing.mesh((world,), ("dp",))
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))
    sharded, unsharded = make_blocks(recipe), make_blocks(recipe)
    for block in sharded:
        fsdp2.fully_shard(block, mesh=over, recompute=True)
    assert check(sharded, recipe, x) == check(unsharded, recipe, x), "sharding changes what is parked"


@every_recipe
def test_offloading_copies_no_weight_that_fsdp2_gathered(ranks, recipe):
    ranks(2).run(check_fsdp2, recipe)


def check_two_dimensions(rank: int, world: int, name: str) -> None:
    recipe, over = RECIPES[name], testing.mesh((2, 2), ("dp", "tp"))
    sharded = make_blocks(recipe)
    for block in sharded:
        parallelize_module(block, over["tp"], {"up": ColumnParallel(), "down": RowParallel()})
        fsdp2.fully_shard(block, mesh=over["dp"], recompute=True)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(over.get_local_rank("dp")))
    check(sharded, recipe, x)
    assert sharded[0].up.weight.placements[1] == Shard(0)


@pytest.mark.parametrize("recipe", ["none", "current", "mx"])
def test_offloading_copies_no_weight_on_a_two_dimensional_mesh(ranks, recipe):
    ranks(4).run(check_two_dimensions, recipe)
