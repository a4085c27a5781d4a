"""Situations of meshes and shapes: over what is sharded, and where cuts go."""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp_common
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from te_dist import fsdp2
from te_dist.formats import Format
from te_dist.fsdp2 import GroupedParameter
from te_dist.tensor_parallel import ColumnParallel, RowParallel
from tests.distributed.matrix.catalog import Formats, situation
from tests.distributed.matrix.model import Beside, Block, Experts, Net, net
from tests.distributed.matrix.sharding import beside, over, wrap

MESHES, SHAPES, PARALLEL = "Meshes", "Shapes", "Beside other parallelism"


def sized(formats: Formats, sizes: tuple[int, int]) -> str | None:
    """Blocks of this size, cut wherever `torch.chunk` cuts them."""
    model = net(formats, sizes)
    try:
        wrap(model)
    except ValueError as error:
        return str(error)
    Beside(model, net(formats, sizes), dist.get_world_size(), dist.get_rank()).follow()
    return None


# -- meshes --------------------------------------------------------------------------------------------------------


@situation("one rank", MESHES, world=1)
def one_rank(formats: Formats) -> None:
    beside(formats).follow()


@situation("one rank, plain `fully_shard`, kept", MESHES, world=1)
def one_rank_by_torch(formats: Formats) -> None:
    beside(formats, how=fsdp.fully_shard, reshard_after_forward=False).follow()


@situation("`replicate()`", MESHES, since=(2, 12))
def replicated(formats: Formats) -> None:
    replicate = importlib.import_module("torch.distributed._composable.replicate_with_fsdp").replicate
    beside(formats, over(names=("rep",)), how=replicate).follow()


@situation("HSDP", MESHES, world=4)
def hybrid_sharded(formats: Formats) -> None:
    beside(formats, over(2, 2, names=("rep", "shard"))).follow()


@situation("HSDP, dimensions of any name", MESHES, world=4)
def hybrid_of_any_name(formats: Formats) -> None:
    beside(formats, over(2, 2, names=("tokyo", "osaka")), reshard_after_forward=False).follow()


@situation("HSDP, one rank to shard over", MESHES)
def hybrid_of_one_shard(formats: Formats) -> None:
    beside(formats, over(2, 1, names=("rep", "shard"))).follow()


@situation("HSDP, one rank to replicate over", MESHES)
def hybrid_of_one_replica(formats: Formats) -> None:
    beside(formats, over(1, 2, names=("rep", "shard"))).follow()


@situation("HSDP, gradients all-reduced in the last microbatch", MESHES, world=4)
def hybrid_accumulated(formats: Formats) -> None:
    both = beside(formats, over(2, 2, names=("rep", "shard")))
    both.sums_alike = False

    def run(model: nn.Module, x: Tensor) -> Tensor:
        for turn in range(2):
            if model is both.sharded:
                model.set_requires_all_reduce(turn == 1)
            out = model(x * (turn + 1))
            (out.square().mean() / 2).backward()
        return out

    both.follow(run=run)


@situation("`dp_mesh_dims=`", MESHES, world=4, since=(2, 12))
def named_dimensions(formats: Formats) -> None:
    mesh = over(2, 2, 1, names=("dp", "cp", "tp"))
    model = net(formats)
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            spread = DTensor.from_local(param.data, mesh, [Replicate()] * 3, run_check=False)
            module.register_parameter(name, nn.Parameter(spread))
    for norm in (block.norm for block in model.blocks):
        use_local_parts(norm)
    dims = fsdp.DataParallelMeshDims(shard="cp", replicate="dp")
    Beside(wrap(model, mesh, dp_mesh_dims=dims), net(formats), 4, dist.get_rank()).follow()


def use_local_parts(norm: nn.LayerNorm) -> None:
    """A norm whose parameters are gathered as DTensors, of which every rank has the whole."""
    norm.forward = lambda x: nn.functional.layer_norm(
        x, norm.normalized_shape, norm.weight.to_local(), norm.bias.to_local(), norm.eps
    )


# -- shapes --------------------------------------------------------------------------------------------------------


@situation("cuts through scale tiles", SHAPES, world=4)
def cut_tiles(formats: Formats) -> str | None:
    return sized(formats, (192, 320))  # tiles of 128 rows, 48 and 80 rows a rank


@situation("uneven rows", SHAPES, world=3, together=False)
def uneven(formats: Formats) -> str | None:
    least = smallest(formats)
    rows = 142 if least <= 2 else 10 * least  # 48, 48 and 46 rows; or 54, 54 and 52
    return sized(formats, (96, rows))


@situation("a rank without rows", SHAPES, world=4, together=False)
def empty_shard(formats: Formats) -> str | None:
    return sized(formats, (128, max(6, smallest(formats))))  # two, two, two and none


@situation("fewer rows than ranks", SHAPES, world=4, together=False)
def fewer_rows(formats: Formats) -> str | None:
    return sized(formats, (128, {1: 3}.get(smallest(formats), smallest(formats))))


def smallest(formats: Formats) -> int:
    """The fewest rows of which there is a matrix, and a multiple of which it has."""
    return max(max(format.alignment(0), *(field.pack for field in format.fields)) for format in formats)


# -- experts -------------------------------------------------------------------------------------------------------


def experts(formats: Formats, num: int, **options: Any) -> None:
    """Stacked weights, as one parameter."""
    models = [Net([Experts(format, (num, 128, 128), seed) for seed, format in enumerate(formats)]) for _ in range(2)]
    Beside(wrap(models[0], **options), models[1], dist.get_world_size(), dist.get_rank()).follow()


@situation("stacked weights, cut between members", SHAPES)
def stacked(formats: Formats) -> None:
    experts(formats, 4)


@situation("stacked weights, fewer members than ranks", SHAPES, world=4)
def stacked_few(formats: Formats) -> None:
    experts(formats, 3)


@situation("stacked weights, cut along rows", SHAPES)
def stacked_by_rows(formats: Formats) -> None:
    experts(formats, 3, shard_placement_fn=lambda param: Shard(1))


@situation("stacked weights under plain `fully_shard`", SHAPES)
def stacked_by_torch(formats: Formats) -> None:
    experts(formats, 4, how=fsdp.fully_shard)


class Mixture(nn.Module):
    """A block, and experts of which every rank along a mesh dimension has others."""

    def __init__(self, format: Format, seed: int) -> None:
        super().__init__()
        self.block = Block(format, (128, 192), 1)
        self.experts = Experts(format, (2, 128, 128), 10 + seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.block(x))


def mixtures(formats: Formats, mesh: DeviceMesh) -> Net:
    """One of every format."""
    return Net([Mixture(format, mesh.get_local_rank("ep")) for format in formats])


def follow_mixtures(sharded: Net, alone: Net, mesh: DeviceMesh) -> None:
    """Trains both; experts are averaged over the ranks that have the same ones."""
    both = Beside(sharded, alone, 4, dist.get_rank())
    both.group_of = lambda name: mesh["edp"].get_group() if ".experts." in name else None
    both.follow()


def one_unit(formats: Formats, cut: int) -> None:
    """Units whose experts are sharded over a mesh of their own."""
    mesh = over(2, 2, names=("edp", "ep"))
    info = fsdp_common.FSDPMeshInfo(mesh=mesh["edp"], shard_mesh_dim=0)
    of_experts = fsdp_common.ShardPlacementResult(Shard(cut), info)

    def placed(param: nn.Parameter) -> Any:
        return of_experts if isinstance(param, GroupedParameter) else None

    model = wrap(mixtures(formats, mesh), reshard_after_forward=True, shard_placement_fn=placed)
    follow_mixtures(model, mixtures(formats, mesh), mesh)


@situation("experts on a mesh of their own, in one unit", PARALLEL, world=4, since=(2, 12))
def own_mesh(formats: Formats) -> None:
    one_unit(formats, 0)


@situation("experts on a mesh of their own, cut along rows", PARALLEL, world=4, since=(2, 12))
def own_mesh_by_rows(formats: Formats) -> None:
    one_unit(formats, 1)


@situation("experts on a mesh of their own, in units of their own", PARALLEL, world=4)
def own_unit(formats: Formats) -> None:
    mesh = over(2, 2, names=("edp", "ep"))
    model = mixtures(formats, mesh)
    for block in model.blocks:
        fsdp2.fully_shard(block.experts, mesh=mesh["edp"])
    follow_mixtures(wrap(model), mixtures(formats, mesh), mesh)


# -- tensor parallelism --------------------------------------------------------------------------------------------


def beside_parallel(
    formats: Formats, styles: dict[str, Any], *, how: Any = fsdp2.fully_shard, spread: str = ""
) -> None:
    """FSDP2 of what tensor parallelism leaves on a rank, on a mesh of two dimensions.

    Args:
        spread: name of a module whose input every rank has whole.
    """
    mesh, model = over(2, 2, names=("dp", "tp")), net(formats)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], styles)
        if spread:
            block.get_submodule(spread).register_forward_pre_hook(
                lambda _, args: DTensor.from_local(args[0], mesh["tp"], [Replicate()], run_check=False)
            )
    wrap(model, mesh["dp"], how=how)
    Beside(model, net(formats), 2, mesh.get_local_rank("dp"), is_exact=False).follow()


@situation("tensor parallelism by columns", PARALLEL, world=4)
def column_parallel(formats: Formats) -> None:
    beside_parallel(formats, {"up": ColumnParallel(output_layouts=Replicate())})


@situation("tensor parallelism by rows", PARALLEL, world=4)
def row_parallel(formats: Formats) -> None:
    beside_parallel(formats, {"down": RowParallel()}, spread="down")


@situation("tensor parallelism by columns, then rows", PARALLEL, world=4)
def column_and_row_parallel(formats: Formats) -> None:
    beside_parallel(formats, {"up": ColumnParallel(), "down": RowParallel()})


@situation("tensor parallelism under plain `fully_shard`", PARALLEL, world=4)
def parallel_by_torch(formats: Formats) -> None:
    beside_parallel(formats, {"up": ColumnParallel(), "down": RowParallel()}, how=fsdp.fully_shard)
