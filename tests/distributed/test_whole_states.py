"""Whole quantized weights, had from shards and loaded into them: bytes on every rank, copies and columns included."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import te_dist as te
from te_dist import fsdp2, testing
from te_dist.nn.moe import ExpertParallel, MoE, Routing
from te_dist.tensor import QuantizedTensor, quantize
from te_dist.tensor.placement import local_tensor
from te_dist.tensor_parallel import ColumnParallel, RowParallel
from te_dist.testing import assert_bitwise
from tests.distributed.probe import FORMATS, Layer, random_matrix
from tests.distributed.test_grouped_fsdp2 import Experts, random_group
from tests.distributed.test_loading import COLS, bytes_of
from tests.distributed.test_tensor_parallel import RECIPES, make_layer

replicate = importlib.import_module("torch.distributed._composable.replicate_with_fsdp").replicate
REPLICAS = {
    "replicate": lambda layer, world: replicate(layer, mesh=testing.mesh((world,), ("dp",))),
    "hsdp": lambda layer, world: fsdp2.fully_shard(layer, mesh=testing.mesh((2, world // 2), ("copies", "dp"))),
}


def check_whole_state_of_replicas(rank: int, world: int, how: str) -> None:
    """What every rank has quantized keeps its bytes on each, though torch sends copies as values."""
    for name, format in FORMATS.items():
        layers = [Layer(format, random_matrix(288, COLS, seed)) for seed in (1, 2)]
        groups = [Experts(format, random_group(seed, members=4)) for seed in (1, 2)]
        for source, layer in (layers, groups):
            for each in (source, layer):
                REPLICAS[how](each.to(testing.device()), world)
            want, options = bytes_of(source), StateDictOptions(full_state_dict=True)
            set_model_state_dict(layer, get_model_state_dict(source, options=options), options=options)
            for field, buffer in bytes_of(layer).items():
                assert_bitwise(buffer, want[field], f"{name}: {field} of rank {rank}")
            for field, buffer in bytes_of(source).items():
                assert_bitwise(buffer, want[field], f"{name}: {field} of the source, rank {rank}")
            for each in (source, layer):
                assert local_tensor(each.weight).storage.unsettled is None


@pytest.mark.each_value
@pytest.mark.parametrize(("how", "world"), [("replicate", 2), ("hsdp", 2), ("hsdp", 4)])
def test_a_whole_state_of_quantized_tensors_is_loaded_into_replicas(ranks, how: str, world: int) -> None:
    ranks(world).run(check_whole_state_of_replicas, how)


def check_others_into_replicas(rank: int, world: int, how: str) -> None:
    """From a model that is whole, and from one whose rows FSDP2 sharded over the same ranks."""
    options = StateDictOptions(full_state_dict=True)
    for name, format in FORMATS.items():
        layer, source, sharded = (Layer(format, random_matrix(256, COLS, 1)).to(testing.device()) for _ in range(3))
        fsdp2.fully_shard(sharded, mesh=testing.mesh((world,), ("dp",)))
        REPLICAS[how](layer, world)
        for state in (dict(source.state_dict()), get_model_state_dict(sharded, options=options)):
            with torch.no_grad():
                layer.weight.zero_()
            set_model_state_dict(layer, state, options=options)
            assert local_tensor(layer.weight).storage.unsettled is None, name
            got = get_model_state_dict(layer, options=options)["weight"]
            assert_same_bytes(got, source.weight.detach(), f"{name}, rank {rank}")


@pytest.mark.each_value
@pytest.mark.parametrize(("how", "world"), [("replicate", 2), ("hsdp", 2), ("hsdp", 4)])
def test_replicas_take_bytes_of_models_that_are_cut_otherwise(ranks, how: str, world: int) -> None:
    ranks(world).run(check_others_into_replicas, how)


def check_whole_weights(rank: int, world: int, recipe: str) -> None:
    """FSDP2 over one rank leaves parts of tensor parallelism as they are: their ranks alone have the whole."""
    grid = testing.mesh((1, world), ("dp", "tp"))
    want, got = (make_layer(RECIPES[recipe], quantized=True).to(testing.device()) for _ in range(2))
    parallelize_module(got, grid["tp"], {"gate": ColumnParallel()})
    fsdp2.fully_shard(got, mesh=grid["dp"])
    whole = got.gate.weight.full_tensor()
    assert isinstance(whole, QuantizedTensor)
    for name, buffer in whole.storage.buffers.items():
        assert_bitwise(buffer, want.gate.weight.storage.buffers[name], name)
    assert not whole.storage.may_share_scales()


@pytest.mark.parametrize("recipe", ["current", "block", "mx", "nv"])
def test_a_whole_weight_is_had_where_fsdp_cuts_over_one_rank(ranks, recipe: str) -> None:
    ranks(2).run(check_whole_weights, recipe)


def check_columns(rank: int, world: int, recipe: str) -> None:
    """Loaded into a part that is cut along both dimensions, and had whole from there."""
    grid = testing.mesh((world // 2, 2), ("dp", "tp"))
    source, layer = (make_layer(RECIPES[recipe], quantized=True).to(testing.device()) for _ in range(2))
    with torch.no_grad():
        layer.down.weight.zero_()
    parallelize_module(layer, grid["tp"], {"down": RowParallel()})
    fsdp2.fully_shard(layer, mesh=grid["dp"])
    state = {"down.weight": source.down.weight.detach()}
    set_model_state_dict(layer, state, options=StateDictOptions(full_state_dict=True, strict=False))
    local = local_tensor(layer.down.weight)
    (rows, cols), (row, col) = local.shape, grid.get_coordinate()
    want = source.down.weight.detach()[row * rows : (row + 1) * rows][:, col * cols : (col + 1) * cols]
    assert local.storage.unsettled is None
    for field in local.storage.format.canonical.fields:
        assert_bitwise(local.storage.buffers[field.name], want.storage.buffers[field.name], field.name)
    state = get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True))
    for whole in (layer.down.weight.full_tensor(), state["down.weight"]):
        assert isinstance(whole, QuantizedTensor)
        assert not whole.storage.may_share_scales()
        for name, buffer in whole.storage.buffers.items():
            assert_bitwise(buffer, source.down.weight.storage.buffers[name], name)
    assert type(torch.cat(source.down.weight.detach().chunk(2, 1), 1)) is torch.Tensor  # values, as ever


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", ["current", "block", "mx", "nv"])
@pytest.mark.parametrize("world", [2, 4])
def test_columns_of_a_whole_weight_are_kept_in_bytes(ranks, world: int, recipe: str) -> None:
    ranks(world).run(check_columns, recipe)


def check_rows_of_members(rank: int, world: int) -> None:
    for name, format in FORMATS.items():
        layer, source = (Experts(format, random_group(1, members=3)).to(testing.device()) for _ in range(2))
        over = testing.mesh((world,), ("dp",))
        fsdp2.fully_shard(layer, mesh=over, shard_placement_fn=lambda param: Shard(1))
        options = StateDictOptions(full_state_dict=True)
        for whole in (layer.weight.full_tensor(), get_model_state_dict(layer, options=options)["weight"]):
            assert isinstance(whole, fsdp2.GroupedParameter), name
            for field, buffer in whole.storage.buffers.items():
                assert_bitwise(buffer, source.weight.storage.buffers[field], f"{name}: {field}")


@pytest.mark.parametrize("world", [2, 3])
def test_a_whole_group_is_had_where_rows_of_its_members_are_cut(ranks, world: int) -> None:
    ranks(world).run(check_rows_of_members)


def check_written_by_one(rank: int, world: int) -> None:
    """What only one rank has written all of them are told of, before anything is gathered."""
    format = FORMATS["float8_tensorwise"]
    layer, group = Layer(format, random_matrix(256, COLS, 1)), Experts(format, random_group(1, members=3))
    rows = {"shard_placement_fn": lambda param: Shard(1)}
    for module, how in ((layer, {}), (group, rows)):
        fsdp2.fully_shard(module.to(testing.device()), mesh=testing.mesh((world,), ("dp",)), **how)
        if rank == 1:
            local = local_tensor(module.weight)
            local.copy_(local.dequantize())
        with pytest.raises(RuntimeError, match=r"parts of ranks \[1\] of 2.*settle"):
            module.weight.full_tensor()


def test_a_part_that_one_rank_has_written_is_refused_on_all(ranks) -> None:
    ranks(2).run(check_written_by_one)


def check_loaded(layer: torch.nn.Module, source: torch.nn.Module) -> None:
    """The whole state of `source`, loaded into a layer that is cut and had back from there, has the same bytes."""
    options = StateDictOptions(full_state_dict=True)
    with torch.no_grad():
        for param in layer.parameters():
            param.fill_(1.0)
    set_model_state_dict(layer, dict(source.state_dict()), options=options)
    for name, param in layer.named_parameters():
        assert not is_quantized(param) or local_tensor(param).storage.unsettled is None, name
    got, want = get_model_state_dict(layer, options=options), source.state_dict()
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_same_bytes(got[name], tensor, name)


def check_cut_twice(rank: int, world: int, recipe: str, ep: int) -> None:
    """FSDP2 cuts the rows, and the experts, that other ranks have parts of already: a rank's parts lie apart.

    Over one rank it leaves them alone.
    """
    grid = testing.mesh((world // ep, ep), ("dp", "tp"))
    with te.quantized_model_init(recipe=RECIPES[recipe]):
        cases = (
            (lambda: make_layer(RECIPES[recipe], quantized=True), {"gate": ColumnParallel(), "up": ColumnParallel()}),
            (lambda: MoE(64, 64, Routing(num_experts=8, top_k=1)), ExpertParallel()),
        )
        for build, plan in cases:
            source, layer = (build().to(testing.device()) for _ in range(2))
            parallelize_module(layer, grid["tp"], plan)
            fsdp2.fully_shard(getattr(layer, "experts", layer), mesh=grid["dp"])
            check_loaded(layer, source)
            cut_twice = [param for param in layer.parameters() if is_quantized(param) and is_cut_twice(param)]
            assert len(cut_twice) == (2 if world > ep else 0)


def check_without_fsdp(rank: int, world: int, recipe: str) -> None:
    """Ranks of tensor and expert parallelism alone: nothing but `distribute_tensor` cuts what they load."""
    over = testing.mesh((world,), ("tp",))
    with te.quantized_model_init(recipe=RECIPES[recipe]):
        cases = (
            (
                lambda: make_layer(RECIPES[recipe], quantized=True),
                {"gate": ColumnParallel(), "up": ColumnParallel(), "down": RowParallel()},
            ),
            (lambda: MoE(64, 64, Routing(num_experts=8, top_k=1)), ExpertParallel()),
        )
        for build, plan in cases:
            source, layer = (build().to(testing.device()) for _ in range(2))
            check_loaded(parallelize_module(layer, over, plan), source)


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", ["current", "block", "mx", "nv", "hybrid"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_whole_state_is_loaded_where_nothing_but_a_layer_is_cut(ranks, world: int, recipe: str) -> None:
    ranks(world).run(check_without_fsdp, recipe)


def is_cut_twice(param: torch.Tensor) -> bool:
    return any(isinstance(placement, _StridedShard) for placement in param.placements)


def is_quantized(param: torch.Tensor) -> bool:
    return isinstance(local_tensor(param), QuantizedTensor)


def assert_same_bytes(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    if not isinstance(want, QuantizedTensor):
        return assert_bitwise(got, want, name)
    assert isinstance(got, QuantizedTensor), name
    for field, buffer in got.storage.buffers.items():
        assert_bitwise(buffer, want.storage.buffers[field], f"{name}.{field}")


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", ["current", "block", "mx", "nv", "hybrid"])
@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_a_whole_state_is_loaded_where_a_dimension_is_cut_twice(ranks, world: int, ep: int, recipe: str) -> None:
    ranks(world).run(check_cut_twice, recipe, ep)


CUTS = {
    "strided": (_StridedShard(0, split_factor=2), Shard(0)),
    "rows": (Shard(0), Shard(0)),
    "columns": (Shard(1), Shard(1)),
    "rows, columns": (Shard(0), Shard(1)),
    "columns, rows": (Shard(1), Shard(0)),
}


def check_distributed(rank: int, world: int, cut: str) -> None:
    """From the first rank, out of what every rank has, and out of copies: the part is that of the whole."""
    grid, placements = testing.mesh((2, 2), ("dp", "tp")), CUTS[cut]
    rows, cols = (part_along(dim, placements, *grid.get_coordinate()) for dim in (0, 1))
    for name, format in FORMATS.items():
        whole = quantize(random_matrix(256, 256, 1).to(testing.device()), format)
        want = whole[rows][:, cols]
        copies = DTensor.from_local(whole, grid, [Replicate(), Replicate()])
        for placed in (
            distribute_tensor(whole, grid, placements),
            distribute_tensor(whole, grid, placements, src_data_rank=None),
            copies.redistribute(placements=placements),
        ):
            assert local_tensor(placed).storage.region == want.storage.region, name
            assert_same_bytes(local_tensor(placed), want, f"{name}, rank {rank}")
            assert_same_bytes(placed.full_tensor(), whole, f"{name}, whole")


def part_along(dim: int, placements, dp: int, tp: int) -> slice:
    """Of 256, what the rank at this place of a 2 x 2 mesh has."""
    by_dp, by_tp = (placement.dim == dim for placement in placements)
    if by_dp and by_tp:
        at = 2 * tp + dp if isinstance(placements[0], _StridedShard) else 2 * dp + tp
        return slice(64 * at, 64 * at + 64)
    at = dp if by_dp else tp
    return slice(128 * at, 128 * at + 128) if by_dp or by_tp else slice(0, 256)


@pytest.mark.every_run(cut=("strided", "rows, columns"))
@pytest.mark.parametrize("cut", CUTS)
def test_a_whole_tensor_is_placed_and_gathered_in_bytes(ranks, cut: str) -> None:
    ranks(4).run(check_distributed, cut)
