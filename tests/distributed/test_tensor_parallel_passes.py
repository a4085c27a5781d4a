"""How often parallel layers plan, what of their passes is noted, and what compilers see of them."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.fx import GraphModule

import te_dist as te
from te_dist import testing
from te_dist.nn.passes import latest_of, planned_of
from te_dist.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from te_dist.tensor_parallel import ColumnParallel, GatherInput, RowParallel, SequenceParallel
from te_dist.testing import assert_bitwise
from tests.distributed.test_tensor_parallel import assert_near, normal

BATCH, SEQUENCE, WIDTH = 2, 32, 64
PAIRS = NVFP4BlockScaling(disable_stochastic_rounding=True)  # two values to a byte, and transforms of 16 rows
RECIPES = [Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling()]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = te.LayerNorm(WIDTH)
        self.up, self.down = te.Linear(WIDTH, 2 * WIDTH), te.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def block(rank: int, world: int, *, gathers: bool = False) -> Block:
    torch.manual_seed(0)
    with testing.device():
        made = Block()
    plan = {
        "norm": SequenceParallel(),
        "up": ColumnParallel(input_layouts=None if gathers else Shard(1)),
        "down": RowParallel(output_layouts=Shard(1)),
    }
    parallelize_module(made, testing.mesh((world,), ("tp",)), plan)
    return made


class Gathering(nn.Module):
    """The maps of a block alone, in a module whose input is gathered."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.up, self.down = block.up, block.down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def check_plans(rank: int, world: int) -> None:
    over, own = testing.mesh((world,), ("tp",)), block(rank, world)
    gathering = Gathering(block(rank, world, gathers=True))
    parallelize_module(gathering, over, GatherInput("up"))
    for module in (own, gathering):
        for _ in range(2):
            for recipe in RECIPES:
                x = normal(BATCH, SEQUENCE // world, WIDTH, seed=1).requires_grad_()
                with te.autocast(recipe=recipe, amax_reduction_group=over.get_group()):
                    module(x).sum().backward()
        for site in (module.up.gemm, module.down.gemm):
            assert len(planned_of[site]) == len(RECIPES)
            assert latest_of[site].pending == 0


def test_a_parallel_layer_has_one_plan_by_each_recipe(ranks):
    ranks(2).run(check_plans)


def check_recipes_in_turn(rank: int, world: int) -> None:
    over, module = testing.mesh((world,), ("tp",)), block(rank, world)
    for step, recipe in enumerate([*RECIPES, None, *RECIPES]):
        x = normal(BATCH, SEQUENCE // world, WIDTH, seed=step).requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=over.get_group()):
            is_kept = step % 3 == 0
            out = module(x) if is_kept else torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
        out.sum().backward()


def test_a_recipe_may_follow_another_behind_a_finished_step_of_torchs_checkpoint(ranks):
    ranks(2).run(check_recipes_in_turn)


def check_rows(rank: int, world: int) -> None:
    """Rows that products with gradients do not take are evaluated, and refused where they train."""
    over, module = testing.mesh((world,), ("tp",)), block(rank, world)
    torch.manual_seed(0)
    with testing.device():
        whole = Block()
    x = normal(1, 3 * world, WIDTH, seed=1)
    with te.autocast(recipe=PAIRS, amax_reduction_group=over.get_group()):
        with torch.no_grad():
            assert_near(module(x.chunk(world, 1)[rank]), whole(x).chunk(world, 1)[rank], "output")
        with pytest.raises(ValueError, match="multiple"):
            module(x.chunk(world, 1)[rank])


def test_a_sequence_of_any_length_is_evaluated_in_parts(ranks):
    ranks(2).run(check_rows)


def check_graphs(rank: int, world: int) -> None:
    over, graphs = testing.mesh((world,), ("tp",)), []

    def backend(graph: GraphModule, example: list[Tensor]) -> GraphModule:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    found = []
    for compiled in (False, True):
        module = block(rank, world)
        if compiled:
            module.compile(backend=backend)
        for step in range(2):
            x = normal(BATCH, SEQUENCE // world, WIDTH, seed=step).requires_grad_()
            with te.autocast(recipe=RECIPES[1], amax_reduction_group=over.get_group()):
                out = module(x)
            out.sum().backward()
            found.append((out.detach(), x.grad))
    for want, got in zip(found[:2], found[2:], strict=True):
        for name, a, b in zip(("output", "input gradient"), got, want, strict=True):
            assert_bitwise(a, b, name)
    assert len(graphs) == 1


def test_a_compiled_parallel_block_is_in_one_graph(ranks):
    ranks(2).run(check_graphs)
