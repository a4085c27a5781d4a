"""Compiled units under FSDP2: graphs take the gathered buffers, and what is gathered again is what they saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from te_dist import fsdp2, recipe
from te_dist.nn.moe import MoE, Routing
from te_dist.recipe import Recipe
from te_dist.tensor.placement import local_tensor
from te_dist.tensor_parallel import ColumnParallel, RowParallel
from te_dist.testing import assert_bitwise, mesh, pool

WIDTH, HIDDEN = 192, 160  # 96 and 80 rows on each of two ranks, cuts through a tile
RECIPES: dict[str, Recipe] = {
    "block": recipe.Float8BlockScaling(),
    "current": recipe.Float8CurrentScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "delayed": recipe.DelayedScaling(),  # whose maps stay outside of graphs
}


class Unit(nn.Sequential):
    """A unit with a forward pass of its own: of those that are torch's, compilers trace hooks as well, or skip all."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


UNITS: dict[str, Callable[[], nn.Module]] = {
    "maps": lambda: Unit(te.Linear(WIDTH, HIDDEN), nn.SiLU(), te.Linear(HIDDEN, WIDTH)),
    "mixture": lambda: Unit(nn.LayerNorm(WIDTH), MoE(WIDTH, 64, Routing(4, 2), shared_ffn_hidden_size=64)),
}


class How(NamedTuple):
    """Of units: by which recipe, whether weights are quantized, whether they are freed after forward."""

    unit: str
    recipe: str
    quantized: bool
    reshards: bool
    recomputes: bool = False  # each unit, as a compiled one, inside of a checkpoint
    keeps_last: bool = False  # gathered, until backward is through with it

    @property
    def is_in_graphs(self) -> bool:
        """Whether maps are: they keep no histories, and no pass gathers a direction of its own."""
        return self.recipe != "delayed" and not (self.recipe == "mxfp8" and self.quantized and self.reshards)


def passes(world: int, rank: int, how: How, *, fullgraph: bool | None) -> list[Tensor]:
    """Output and gradients of the second of two passes of two units, compiled unless `fullgraph` is None."""
    torch.compiler.reset()
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=how.quantized, recipe=RECIPES[how.recipe]):
        units = [UNITS[how.unit]() for _ in range(2)]
    for unit in units:
        if fullgraph is not None:
            unit.compile(backend="aot_eager", fullgraph=fullgraph)
    if how.recomputes:
        units = [checkpoint_wrapper(unit, context_fn=te.recompute.context_fn) for unit in units]
    model = nn.Sequential(*units)
    for unit in units:
        reshards = how.reshards and not (how.keeps_last and unit is units[-1])
        options = dict(reshard_after_forward=reshards, recompute=how.recomputes)
        fsdp2.fully_shard(unit, mesh=mesh((world,), ("dp",)), **options)
    fsdp2.fully_shard(model, mesh=mesh((world,), ("dp",)))
    for seed in range(2):
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(2 * seed + rank)).requires_grad_()
        model.zero_grad()
        with te.autocast(recipe=RECIPES[how.recipe]):
            out = model(x)
        out.square().sum().backward()
    return [out.detach(), x.grad, *(param.grad.to_local() for param in model.parameters())]


def compare(rank: int, world: int, how: How) -> None:
    eager, compiled = (passes(world, rank, how, fullgraph=flag) for flag in (None, how.is_in_graphs))
    for index, (got, want) in enumerate(zip(compiled, eager, strict=True)):
        assert_bitwise(got, want, f"{index} of {how}")


@pytest.mark.each_value
@pytest.mark.parametrize(("quantized", "reshards"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("unit", UNITS)
def test_compiled_units_compute_the_bits_of_eager_ones(unit: str, name: str, quantized: bool, reshards: bool) -> None:
    pool(2).run(compare, How(unit, name, quantized, reshards))


@pytest.mark.parametrize(("name", "keeps_last"), [("block", False), ("mxfp8", False), ("mxfp8", True)])
def test_compiled_units_that_are_recomputed_compute_the_bits_of_eager_ones(name: str, keeps_last: bool) -> None:
    """What forward kept out of graphs stays out of them when backward, which gathers more, runs it again."""
    how = How("maps", name, quantized=True, reshards=True, recomputes=True, keeps_last=keeps_last)
    pool(2).run(compare, how)


def compare_tensor_parallel(rank: int, world: int, name: str, sequence: bool) -> None:
    """Maps by histories stay outside of graphs, which get no weight then: its gradient is none of theirs."""
    found: list[list[Tensor]] = []
    for compiled in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        with te.quantized_model_init(recipe=RECIPES[name]):
            blocks = [
                nn.ModuleDict({"up": te.Linear(WIDTH, 256), "down": te.Linear(256, WIDTH)}),
                nn.ModuleDict({"up": te.LayerNormLinear(WIDTH, 256), "down": te.Linear(256, WIDTH)}),
            ]
        units = [Block(**block) for block in blocks]
        for unit in units:
            cut = Shard(1) if sequence else None
            plan = {"up": ColumnParallel(input_layouts=cut), "down": RowParallel(output_layouts=cut)}
            parallelize_module(unit, mesh((world,), ("tp",)), plan)
            if compiled:
                unit.compile(backend="aot_eager")
        model = nn.Sequential(*units)
        for seed in range(2):
            x = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            model.zero_grad()
            with te.autocast(recipe=RECIPES[name]):
                out = model(x)
            out.square().sum().backward()
        found.append([out.detach(), x.grad, *(local_tensor(param.grad) for param in model.parameters())])
    for index, (want, got) in enumerate(zip(*found, strict=True)):
        assert_bitwise(got, want, f"{index} of {name}")


class Block(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


@pytest.mark.every_run(name=("mxfp8",))
@pytest.mark.parametrize(("name", "sequence"), [("block", False), ("mxfp8", True), ("delayed", False)])
def test_compiled_blocks_with_tensor_parallelism_compute_the_bits_of_eager_ones(name: str, sequence: bool) -> None:
    pool(2).run(compare_tensor_parallel, name, sequence)


def compile_sequential(rank: int, world: int) -> None:
    torch.compiler.reset()
    unit = nn.Sequential(te.Linear(WIDTH, WIDTH))
    unit.compile(backend="aot_eager", fullgraph=True)
    fsdp2.fully_shard(unit, mesh=mesh((world,), ("dp",)))
    with pytest.raises(Exception, match="Compile units of a class with a forward pass of its own"):
        unit(torch.ones(32, WIDTH))


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="torch compiles what is inside, and none of the hooks")
def test_one_graph_of_a_unit_whose_forward_pass_is_torchs_is_refused() -> None:
    pool(2).run(compile_sequential)


def refuse(rank: int, world: int) -> None:
    with pytest.raises(Exception, match="its weight lacks what backward multiplies .*reshard_after_forward=False"):
        passes(world, rank, How("maps", "mxfp8", True, True), fullgraph=True)


def test_one_graph_of_maps_whose_directions_are_gathered_apart_is_refused() -> None:
    pool(2).run(refuse)
