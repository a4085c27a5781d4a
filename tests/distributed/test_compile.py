"""Compiled units under FSDP2: graphs take the gathered buffers, and what is gathered again is what they saved."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from te_dist import fsdp2, recipe
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


def passes(world: int, rank: int, how: tuple[str, bool, bool], compiled: bool) -> list[Tensor]:
    """Output and gradients of the second of two passes of two units; `how`: recipe, quantized weights, reshards."""
    name, quantized, reshards = how
    torch.compiler.reset()
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=quantized, recipe=RECIPES[name]):
        units = [Unit(te.Linear(WIDTH, HIDDEN), nn.SiLU(), te.Linear(HIDDEN, WIDTH)) for _ in range(2)]
    model = nn.Sequential(*units)
    for unit in units:
        if compiled:
            unit.compile(backend="aot_eager", fullgraph=name != "delayed")
        fsdp2.fully_shard(unit, mesh=mesh((world,), ("dp",)), reshard_after_forward=reshards)
    fsdp2.fully_shard(model, mesh=mesh((world,), ("dp",)))
    for seed in range(2):
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(2 * seed + rank)).requires_grad_()
        model.zero_grad()
        with te.autocast(recipe=RECIPES[name]):
            out = model(x)
        out.square().sum().backward()
    return [out.detach(), x.grad, *(param.grad.to_local() for param in model.parameters())]


def compare(rank: int, world: int, *how: str | bool) -> None:
    eager, compiled = (passes(world, rank, how, flag) for flag in (False, True))
    for index, (got, want) in enumerate(zip(compiled, eager, strict=True)):
        assert_bitwise(got, want, f"{index} of {how}")


@pytest.mark.each_value
@pytest.mark.parametrize(("quantized", "reshards"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("name", RECIPES)
def test_compiled_units_compute_the_bits_of_eager_ones(name: str, quantized: bool, reshards: bool) -> None:
    if quantized and reshards and name == "mxfp8":
        pytest.skip("each pass gathers its own direction: refused, see below")
    pool(2).run(compare, name, quantized, reshards)


def compare_tensor_parallel(rank: int, world: int, name: str, sequence: bool) -> None:
    """Maps that keep a process group stay outside of graphs, which get no weight: its gradient is none of theirs."""
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
    with pytest.raises(Exception, match="Pass reshard_after_forward=False to fsdp2.fully_shard"):
        passes(world, rank, ("mxfp8", True, True), True)


def test_a_direction_that_only_backward_gathers_is_refused_before_the_pass() -> None:
    pool(2).run(refuse)
