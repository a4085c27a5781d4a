"""Quantized parameters under FSDP2: what modules see is the quantized whole, and nothing of it stays."""

from __future__ import annotations

import time
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp_common
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import te_dist as te
from te_dist import fsdp2, optim, recipe
from te_dist.formats import Region
from te_dist.nn import Linear, products
from te_dist.tensor import QuantizedTensor
from te_dist.tensor.placement import local_tensor
from te_dist.tensor.traffic import Traffic
from te_dist.testing import StorageTracker, assert_bitwise, mesh, pool
from tests.distributed.probe import FORMATS, SOME, Layer, assert_directions, assert_seen, fits, random_matrix

COLS = 160  # a ragged tile of 128; a multiple of 32 and 16


def masters_of(layer: Layer, optimizer: optim.FusedAdam) -> torch.Tensor:
    return optimizer.state[layer.weight]["master_param"].full_tensor()


def assert_nothing_unsharded(tracker: StorageTracker, besides: list[torch.Tensor], smallest: int) -> None:
    """No storage of an unsharded parameter is allocated; gloo's threads may drop theirs a moment after the wait."""
    deadline = time.monotonic() + 5
    while True:
        unsharded = [a for a in tracker.alive(besides=besides) if a.nbytes >= smallest]
        if not unsharded or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    assert not unsharded, f"unsharded bytes are alive after backward: {[str(a) for a in unsharded]}"


def train_and_compare(rank: int, world: int, name: str, rows: int, how: str) -> None:
    """Two optimizer steps; every unsharded weight against the gathered masters, quantized whole."""
    masters = [random_matrix(rows, COLS, seed) for seed in (0, 1)]
    layers = [Layer(FORMATS[name], master) for master in masters]
    data_mesh = mesh((world,), ("dp",))
    reshard = how != "kept"
    for layer in layers:
        if how == "torch":
            torch_fully_shard(layer, mesh=data_mesh)
        else:
            fsdp2.fully_shard(layer, mesh=data_mesh, reshard_after_forward=reshard, recompute=how == "recompute")
    optimizer = optim.FusedAdam([layer.weight for layer in layers], lr=0.05)
    for step in range(2):
        x = random_matrix(8, COLS, 100 * step + rank).requires_grad_()
        with StorageTracker() as tracker:
            y = [layer(x) for layer in layers]
            sum((each**2).mean() for each in y).backward()
        for layer, master in zip(layers, masters, strict=True):
            assert_seen(layer, master, backward=False)
            assert_seen(layer, master, backward=True)
            if how in ("ours", "recompute"):
                assert_directions(layer, recompute=how == "recompute")
        shards = [t for layer in layers for t in (layer.weight.grad._local_tensor, layer.weight._local_tensor)]
        kept = [x.grad, *y, *shards]
        seen = [w for layer in layers for d in (layer.seen_in_forward, layer.seen_in_backward) for w in d.values()]
        if how != "recompute":
            del y
            assert_nothing_unsharded(tracker, [*kept, *seen], rows * COLS // 4)
        optimizer.step()
        optimizer.zero_grad()
        masters = [masters_of(layer, optimizer) for layer in layers]
        assert not any(layer.weight._local_tensor.storage.unsettled is not None for layer in layers)


@pytest.mark.every_run(name=(*SOME, "nvfp4_1d"))
@pytest.mark.each_value
@pytest.mark.parametrize(
    ("name", "world", "rows"),
    [
        *product(FORMATS, (3,), (328,)),
        *product(SOME, (1,), (384,)),
        *product(SOME, (2,), (328,)),
        *product(SOME, (4,), (384,)),
    ],
)
def test_unsharded_weight_is_the_quantized_whole(name: str, world: int, rows: int) -> None:
    if not fits(FORMATS[name], rows, world):
        rows = 384
    pool(world).run(train_and_compare, name, rows, "ours")


@pytest.mark.each_value
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("how", ["torch", "kept", "recompute"])
def test_every_way_to_wrap(how: str, name: str) -> None:
    pool(2).run(train_and_compare, name, 352, how)


def lay_out_and_free(rank: int, world: int, reshards: bool) -> None:
    """On devices that read one order alone, a product lays out the other for itself; CPUs, which read both, pretend."""
    for made_by in (recipe.Float8BlockScaling(), recipe.Float8CurrentScaling()):
        results = []
        for any_order in (products.READS_ANY_ORDER, ()):
            torch.manual_seed(0)
            with te.quantized_model_init(recipe=made_by):
                layer = Linear(128, 192, bias=False)
            fsdp2.fully_shard(layer, mesh=mesh((world,), ("dp",)), reshard_after_forward=reshards)
            weights: list[QuantizedTensor] = []
            layer.register_forward_pre_hook(lambda module, _, weights=weights: weights.append(module.weight))
            x = torch.randn(32, 128, requires_grad=True)
            with mock.patch.object(products, "READS_ANY_ORDER", any_order), StorageTracker() as tracker:
                with te.autocast(recipe=made_by):
                    y = layer(x)
                y.square().sum().backward()
            assert_nothing_unsharded(tracker, [x.grad, y, layer.weight.grad._local_tensor], 128 * 192 // 2)
            row = {field.name for field in weights[0].format.rowwise.fields}
            assert weights[0].storage.buffers.keys() == row
            results.append([y.detach(), x.grad, layer.weight.grad._local_tensor])
        for index, (got, want) in enumerate(zip(*results, strict=True)):
            assert_bitwise(got, want, f"result {index}")


@pytest.mark.parametrize("reshards", [True, False])
def test_what_products_lay_out_ends_with_them(reshards: bool) -> None:
    pool(2).run(lay_out_and_free, reshards)


@pytest.mark.parametrize("name", [name for name in SOME if FORMATS[name].alignment(0) == 1])
def test_fewer_rows_than_ranks(name: str) -> None:
    pool(4).run(train_and_compare, name, 2, "ours")
    if all(f.pack == 1 for f in FORMATS[name].fields):
        pool(2).run(train_and_compare, name, 1, "torch")


def wrap_misaligned(rank: int, world: int, name: str) -> str:
    layer = Layer(FORMATS[name], random_matrix(16 * 7, COLS, 0))
    with pytest.raises(ValueError, match="inside a stored byte") as error:
        fsdp2.fully_shard(layer, mesh=mesh((world,), ("dp",)))
    return str(error.value)


@pytest.mark.parametrize("name", ["nvfp4_1d_hadamard"])
def test_a_cut_inside_a_stored_byte_is_refused_on_every_rank(name: str) -> None:
    first, *others = pool(3).run(wrap_misaligned, name)
    assert all(other == first for other in others)


def write_and_compare(rank: int, world: int, name: str, settle: bool) -> None:
    """High-precision values written shard by shard end as the quantized whole."""
    rows = 336
    layer = Layer(FORMATS[name], random_matrix(rows, COLS, 0))
    fsdp2.fully_shard(layer, mesh=mesh((world,), ("dp",)))
    whole = random_matrix(rows, COLS, 5)
    start = layer.weight._local_tensor.storage.region.rows
    layer.weight._local_tensor.copy_(whole[start.start : start.stop])
    if settle:
        fsdp2.settle(layer)
        assert layer.weight._local_tensor.storage.unsettled is None
    layer(random_matrix(4, COLS, rank))
    assert_seen(layer, whole, backward=False)


@pytest.mark.parametrize(("name", "settle"), [*product(FORMATS, (True,)), *product(SOME, (False,))])
def test_values_written_into_shards_agree_on_their_scales(name: str, settle: bool) -> None:
    pool(3).run(write_and_compare, name, settle)


def late_change(rank: int, world: int) -> str:
    layer = Layer(FORMATS["mxfp8_1d"], random_matrix(64, COLS, 0))
    fsdp2.fully_shard(layer, mesh=mesh((world,), ("dp",)), reshard_after_forward=True)
    layer(random_matrix(4, COLS, 1).requires_grad_()).sum().backward()
    layer.set_reshard_after_forward(False)
    with pytest.raises(RuntimeError, match="before the first forward") as error:
        layer(random_matrix(4, COLS, 1))
    return str(error.value)


def test_a_late_set_reshard_after_forward_raises_on_every_rank() -> None:
    first, second = pool(2).run(late_change)
    assert first == second


def count_bytes(rank: int, world: int, name: str, recompute: bool) -> tuple[list[int], list[int]]:
    """Bytes each rank sends in forward and in backward: as seen, and as planned."""
    layer = Layer(FORMATS[name], random_matrix(328 if fits(FORMATS[name], 328, world) else 384, COLS, 0))
    over = mesh((world,), ("dp",))
    fsdp2.fully_shard(layer, mesh=over, reshard_after_forward=True, recompute=recompute)
    with Traffic() as traffic:
        y = layer(random_matrix(4, COLS, 1).requires_grad_()).sum()
        forward = traffic.nbytes("all_gather")
        y.backward()
    plans = layer.weight._local_tensor.gather_plans(world)
    return [forward, traffic.nbytes("all_gather") - forward], [plans[phase].nbytes for phase in fsdp2.Phase]


@pytest.mark.each_value
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recompute"])
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_on_the_wire_are_those_of_the_plan(name: str, recompute: bool) -> None:
    for seen, planned in pool(3).run(count_bytes, name, recompute):
        assert seen == planned


@pytest.mark.parametrize("name", FORMATS)
def test_a_plan_sends_no_more_than_the_larger_direction(name: str) -> None:
    format, region = FORMATS[name], Region.whole(384, COLS)
    parts = region.chunk(4)
    by_direction = [
        sum(max(f.compact_bytes(p) for p in parts) for f in format[d].fields if not f.is_shared(0))
        for d in format.directions
    ]
    largest = by_direction[0] if format.columnwise_is_derivable else max(by_direction)
    plan = fsdp2.plan_gather(format, parts, policy=fsdp2.RESHARDED, phase=fsdp2.Phase.FORWARD)
    assert largest <= plan.nbytes < largest + 64  # packed fields start at multiples of 16 bytes


def wrap_stacked(rank: int, world: int) -> str:
    layer = Layer(FORMATS["mxfp8_1d"], random_matrix(96, COLS, 0))
    layer.weight = nn.Parameter(layer.weight.data.view(3, 32, COLS))
    with pytest.raises(ValueError, match="weight has shape .* te_dist.grouped.quantize") as error:
        fsdp2.fully_shard(layer, mesh=mesh((world,), ("dp",)))
    return str(error.value)


def wrap_two_types(rank: int, world: int) -> None:
    model = torch.nn.Sequential(Linear(32, 32, params_dtype=torch.bfloat16), Linear(32, 32))
    with pytest.raises(ValueError, match=r"torch.bfloat16 \(0.weight\), torch.float32 \(1.weight\)"):
        fsdp2.fully_shard(model, mesh=mesh((world,), ("dp",)))
    model[1].requires_grad_(False)
    fsdp2.fully_shard(model, mesh=mesh((world,), ("dp",)))


def test_trained_parameters_of_a_unit_have_one_type() -> None:
    pool(2).run(wrap_two_types)


def wrap_two_types_over_two_meshes(rank: int, world: int) -> None:
    """Gradients of each mesh are reduced in a buffer of its own."""
    own = fsdp_common.FSDPMeshInfo(mesh=mesh((world, 1), ("ep", "edp"))["edp"], shard_mesh_dim=0)
    model = nn.Sequential(Linear(32, 32), Linear(32, 32, params_dtype=torch.bfloat16))
    others = set(model[1].parameters())
    fsdp2.fully_shard(
        model,
        mesh=mesh((world,), ("dp",)),
        shard_placement_fn=lambda param: fsdp_common.ShardPlacementResult(Shard(0), own) if param in others else None,
    )
    model[1].register_forward_pre_hook(lambda _, args: args[0].bfloat16())
    model(torch.ones(4, 32)).sum().backward()
    assert model[0].weight.grad.dtype == torch.float32
    assert model[1].weight.grad.dtype == torch.bfloat16


@pytest.mark.skipif(not hasattr(fsdp_common, "ShardPlacementResult"), reason="one mesh a unit in this torch")
def test_parameters_of_two_meshes_may_have_two_types() -> None:
    pool(2).run(wrap_two_types_over_two_meshes)


def wrap_over_ranks_of_experts(rank: int, world: int) -> str:
    """Experts have to be wrapped before, over the ranks that have the same ones."""
    over = mesh((1, world), ("edp", "ep"))
    block = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    block[1].weight = nn.Parameter(distribute_tensor(block[1].weight.data, over["ep"], [Shard(0)]))
    with pytest.raises(
        ValueError, match=r"1.weight lies on .*ep.* already, got .*dp.*fully_shard\(block.experts"
    ) as error:
        fsdp2.fully_shard(block, mesh=mesh((world,), ("dp",)))
    fsdp2.fully_shard(block[1], mesh=over["edp"])
    fsdp2.fully_shard(block, mesh=mesh((world,), ("dp",)))
    return str(error.value)


def test_ranks_that_hold_other_parts_are_not_sharded_over() -> None:
    first, second = pool(2).run(wrap_over_ranks_of_experts)
    assert first == second


def wrap_a_part_without_rows(rank: int, world: int) -> str:
    over = mesh((1, world), ("dp", "tp"))
    layer = Layer(FORMATS["mxfp8_1d"], random_matrix(1, COLS, 0))
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, over["tp"], [Shard(0)]))
    with pytest.raises(ValueError, match=r"weight: 1 rows over 2 ranks of .*tp=2.* without any") as error:
        fsdp2.fully_shard(layer, mesh=over["dp"])
    return str(error.value)


def test_parts_without_rows_are_refused_on_every_rank() -> None:
    first, second = pool(2).run(wrap_a_part_without_rows)
    assert first == second


def wrap_again(rank: int, world: int) -> list[str]:
    """A module twice, or what is inside of it after it; with parameters that are shards, or gathered."""
    over, messages = mesh((world,), ("dp",)), []
    for run, again in ((False, None), (False, "0"), (True, None), (True, "0")):
        model = nn.Sequential(Layer(FORMATS["mxfp8_1d"], random_matrix(96, COLS, 0)), nn.Linear(96, 8))
        fsdp2.fully_shard(model, mesh=over, reshard_after_forward=not run)
        if run:
            model(torch.ones(4, COLS))
        said = "weight is sharded by fully_shard already.*for the blocks first"
        with pytest.raises(ValueError, match=said) as error:
            fsdp2.fully_shard(model if again is None else model.get_submodule(again), mesh=over)
        messages.append(str(error.value))
    return messages


def test_modules_are_wrapped_once_and_from_within() -> None:
    first, second = pool(2).run(wrap_again)
    assert first == second


def wrap_after_deletion(rank: int, world: int) -> None:
    units = [nn.Linear(8, 8) for _ in range(2)]
    fsdp2.fully_shard(units[0], mesh=mesh((world,), ("dp",)))
    del units[0].bias
    fsdp2.fully_shard(units[1], mesh=mesh((world,), ("dp",)))


def test_units_may_have_lost_parameters_when_others_are_wrapped() -> None:
    pool(2).run(wrap_after_deletion)


def wrap_tied(rank: int, world: int, is_quantized: bool) -> str:
    """In two units both would be sharded, and updated each by its own gradient."""
    over = mesh((world,), ("dp",))
    layers = [Layer(FORMATS["mxfp8_1d"], random_matrix(96, COLS, 0)) if is_quantized else nn.Linear(8, 8) for _ in "ab"]
    layers[1].weight = layers[0].weight
    fsdp2.fully_shard(layers[0], mesh=over)
    with pytest.raises(ValueError, match=r"1.weight is tied to weight of \w+, a unit .* as one unit") as error:
        fsdp2.fully_shard(nn.Sequential(*layers), mesh=over)
    return str(error.value)


@pytest.mark.parametrize("is_quantized", [True, False])
def test_parameters_that_units_would_share_are_refused_on_every_rank(is_quantized: bool) -> None:
    first, second = pool(2).run(wrap_tied, is_quantized)
    assert first == second


def wrap_beside_ignored(rank: int, world: int) -> None:
    taken, left = layers = [Layer(FORMATS["nvfp4_1d"], random_matrix(rows, COLS, 0)) for rows in (64, 66)]
    ignored, asked = left.weight, []  # 33 rows a rank would be cut inside a byte
    unit = nn.Sequential(*layers)
    options = {"ignored_params": {ignored}, "shard_placement_fn": asked.append}
    fsdp2.fully_shard(unit, mesh=mesh((world,), ("dp",)), **options)
    assert left.weight is ignored and ignored.wrap is None
    assert asked and all(param is not ignored for param in asked)
    assert taken.weight.to_local().wrap is not None


def test_parameters_that_are_ignored_are_not_looked_at() -> None:
    pool(2).run(wrap_beside_ignored)


def test_stacked_matrices_have_to_be_a_group() -> None:
    first, second = pool(2).run(wrap_stacked)
    assert first == second


def count_reductions(rank: int, world: int) -> list[int]:
    """All-reduces of one optimizer step over several layers with per-tensor scales and cut tiles."""
    names = ["float8_tensorwise", "float8_block_2d", "nvfp4_2d", "high_precision"]
    layers = [Layer(FORMATS[n], random_matrix(200, COLS, i)) for i, n in enumerate(names)]
    for layer in layers:
        fsdp2.fully_shard(layer, mesh=mesh((world,), ("dp",)))
    optimizer = optim.FusedAdam([layer.weight for layer in layers], lr=0.1)
    calls = []
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(args[0].numel()), original(*args, **kwargs))[1]
    try:
        for layer in layers:
            layer(random_matrix(4, COLS, rank)).sum().backward()
        optimizer.step()
    finally:
        dist.all_reduce = original
    return calls


def test_one_reduction_a_step() -> None:
    for calls in pool(2).run(count_reductions):
        assert len(calls) == 1, calls


def shard_by_name(rank: int, world: int) -> str:
    """On the mesh of all parallelisms, over whose last dimension nothing is sharded."""
    over, master = mesh((2, 2, 1), ("dp", "cp", "tp")), random_matrix(32, COLS, 0)
    layers = [Layer(FORMATS["nvfp4_1d_hadamard"], master) for _ in range(2)]
    for layer in layers:
        whole = DTensor.from_local(layer.weight.data, over, [Replicate()] * 3, run_check=False)
        layer.weight = nn.Parameter(whole)
    dims = fsdp.DataParallelMeshDims(shard="cp", replicate="dp")
    fsdp2.fully_shard(layers[0], mesh=over, dp_mesh_dims=dims)
    layers[0](random_matrix(4, COLS, rank).requires_grad_()).sum().backward()
    assert layers[0].weight.to_local().shape == (16, COLS)
    assert_seen(layers[0], master, backward=False)
    assert_seen(layers[0], master, backward=True)
    with pytest.raises(ValueError, match="32 rows over 4 ranks are cut at row 8") as error:
        fsdp2.fully_shard(layers[1], mesh=over, dp_mesh_dims=fsdp.DataParallelMeshDims(shard=("dp", "cp")))
    return str(error.value)


@pytest.mark.skipif(not hasattr(fsdp, "DataParallelMeshDims"), reason="dp_mesh_dims= is from torch 2.12 on")
def test_cuts_are_checked_over_the_dimensions_that_are_named() -> None:
    first, *others = pool(4).run(shard_by_name)
    assert all(other == first for other in others)


def free_a_direction(rank: int, world: int) -> None:
    """Of a shard, and of a weight that is to be sharded."""
    over = mesh((world,), ("dp",))
    made_by = recipe.MXFP8BlockScaling()
    with te.quantized_model_init(recipe=made_by):
        model = te.Linear(64, 64, bias=False)
    fsdp2.fully_shard(model, mesh=over)
    for usage in ({"columnwise_usage": False}, {"rowwise_usage": False}):
        with pytest.raises(RuntimeError, match="of a shard, which FSDP2 gathers"):
            local_tensor(model.weight).update_usage(**usage)
    with te.autocast(recipe=made_by):
        model(torch.ones(32, 64)).sum().backward()
    with te.quantized_model_init(recipe=made_by):
        model = te.Linear(64, 64, bias=False)
    model.weight.update_usage(columnwise_usage=False)
    with pytest.raises(ValueError, match=r"weight: \['col_data', .*freed by update_usage"):
        fsdp2.fully_shard(model, mesh=over)


def test_shards_keep_both_directions() -> None:
    pool(2).run(free_a_direction)


def footprints_of_parts(rank: int, world: int) -> None:
    over = mesh((world,), ("dp",))
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    fsdp2.fully_shard([model[0], model[1]], mesh=over)
    fsdp2.fully_shard(model[2], mesh=over)
    fsdp2.fully_shard(model, mesh=over)
    model[2].set_modules_to_backward_prefetch([model[0]])
    for part, names in ((model[0], {"weight", "bias"}), (model[2], {"weight", "bias"})):
        found = fsdp2.footprints(part)
        assert {each.name for each in found.parameters} == names
        assert found.ahead == ((), ())


def test_a_part_of_a_model_has_a_footprint() -> None:
    pool(2).run(footprints_of_parts)
