"""Loading high-precision values: parameters stay quantized, in place or assigned, whole or in shards."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import te_dist as te
from te_dist import fsdp2, grouped, optim, testing
from te_dist.formats import Format
from te_dist.fsdp2 import GroupedParameter, QuantizedParameter
from te_dist.grouped import quantized_part
from te_dist.nn.module import QuantizedModule
from te_dist.recipe import Float8BlockScaling
from te_dist.tensor import quantize
from te_dist.tensor.placement import local_part, local_tensor
from te_dist.testing import assert_bitwise
from tests.distributed.probe import FORMATS, SOME, Layer, assert_seen, fits, random_matrix, wires
from tests.distributed.test_grouped_fsdp2 import Experts, random_group

COLS = 160


def on_meta(format: Format, rows: int, *, keeps: bool = False) -> te.Linear:
    """A layer on meta whose weight is of any format."""
    layer = te.Linear(COLS, rows, device="meta", bias=False)
    weight = Layer(format, torch.zeros(rows, COLS)).to("meta").weight.data
    weight.keep_initial = keeps
    layer.weight = nn.Parameter(weight)
    return layer


@pytest.mark.parametrize("name", FORMATS)
def test_values_assigned_to_a_parameter_on_meta_are_quantized(name: str) -> None:
    layer, values = on_meta(FORMATS[name], 96, keeps=True), random_matrix(96, COLS, 3)
    layer.load_state_dict({"weight": values}, assign=True)
    assert isinstance(layer.weight, QuantizedParameter)
    assert layer.weight.requires_grad
    assert_bitwise(layer.weight.get_high_precision_init_val(), values, "what is kept")
    want = wires(quantize(values, FORMATS[name]))
    for field in FORMATS[name].canonical.fields:
        assert_bitwise(wires(layer.weight)[field.name], want[field.name], field.name)
    other = on_meta(FORMATS[name], 96)
    other.load_state_dict(layer.state_dict(), assign=True)
    assert other.weight.storage is layer.weight.storage, "bytes of the same format are taken as they are"


def test_assigned_values_bring_their_dtype_and_keep_what_was_frozen() -> None:
    layer = on_meta(FORMATS["float8_block_2d"], 96)
    layer.weight.requires_grad_(False)
    layer.load_state_dict({"weight": random_matrix(96, COLS, 3).bfloat16()}, assign=True)
    assert (layer.weight.dtype, layer.weight.requires_grad) == (torch.bfloat16, False)


def test_groups_are_quantized_when_values_are_assigned() -> None:
    with te.quantized_model_init(recipe=Float8BlockScaling()), torch.device("meta"):
        each, one = (te.GroupedLinear(3, 128, 128, bias=False, single_grouped_weight=flag) for flag in (False, True))
    values = torch.randn(3, 128, 128)
    one.load_state_dict({"weight": values}, assign=True)
    each.load_state_dict({"weight": values}, assign=True)
    assert isinstance(one.weight, GroupedParameter)
    for number, member in enumerate(one.weight.members):
        assert isinstance(getattr(each, f"weight{number}"), QuantizedParameter)
        assert_bitwise(getattr(each, f"weight{number}").row_data, member.row_data, f"expert {number}")


def check_assigned(rank: int, world: int, how: str) -> None:
    over = testing.mesh((world,), ("dp",))
    wrap = torch_fully_shard if how == "torch" else fsdp2.fully_shard
    for name, format in FORMATS.items():
        rows = 330 if fits(format, 330, world) else 288
        values = random_matrix(rows, COLS, 3).to(testing.device())
        layer = Layer(format, torch.zeros(rows, COLS)).to("meta")
        if how == "torch":
            layer.__class__ = LayerOfOurs  # plain `fully_shard` knows nothing of assigning, modules of te_dist do
        wrap(layer, mesh=over)
        for turn in range(2):  # on meta; and where FSDP2 has gathered the weight and kept it
            layer.load_state_dict({"weight": distribute_tensor(values, over, [Shard(0)])}, assign=True)
            assert isinstance(local_tensor(layer.weight), QuantizedParameter), name
            x = random_matrix(4, COLS, rank).to(values.device).requires_grad_()
            layer(x).sum().backward()
            assert_seen(layer, values.cpu(), backward=True)
            values = values * 3 + turn
            if turn == 0:
                layer.unshard()


class LayerOfOurs(Layer, QuantizedModule):
    """With what modules of te_dist do when they are loaded."""


@pytest.mark.parametrize("how", ["ours", "torch"])
def test_values_assigned_to_shards_are_the_quantized_whole(ranks, how: str) -> None:
    ranks(3).run(check_assigned, how)


def refuse_assigned(rank: int, world: int) -> list[str]:
    over = testing.mesh((world,), ("dp",))
    layer = Layer(FORMATS["mxfp8_1d"], torch.zeros(96, COLS)).to("meta")
    fsdp2.fully_shard(layer, mesh=over)
    values, messages = torch.zeros(96, COLS, device=testing.device()), []
    for wrong in (values, distribute_tensor(values, over, [Replicate()])):
        with pytest.raises(ValueError, match="weight: assigned is .*distribute_tensor") as error:
            layer.load_state_dict({"weight": wrong}, assign=True)
        messages.append(str(error.value))
    return messages


def test_values_that_are_placed_otherwise_are_refused_on_every_rank(ranks) -> None:
    first, second = ranks(2).run(refuse_assigned)
    assert first == second


def test_values_that_were_loaded_are_kept_where_those_of_initialization_are() -> None:
    with te.quantized_model_init(recipe=Float8BlockScaling(), preserve_high_precision_init_val=True):
        layer = te.Linear(128, 128)
    values = torch.randn(128, 128)
    layer.load_state_dict({"weight": values, "bias": torch.zeros(128)})
    assert_bitwise(layer.weight.get_high_precision_init_val(), values, "kept values")


def ways_to_load(values: Tensor, over: DeviceMesh, path: str) -> dict[str, Callable[[nn.Module], object]]:
    """By name, how whole plain values come into the weight of a layer; in a checkpoint columns are apart."""
    whole, spread = {"weight": values}, {"weight": distribute_tensor(values, over, [Shard(0)])}
    dcp.save({"weight": distribute_tensor(values, over, [Shard(values.dim() - 1)])}, checkpoint_id=path)
    full = StateDictOptions(full_state_dict=True)
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    of_first = whole if dist.get_rank() == 0 else {}
    return {
        "load_state_dict": lambda layer: layer.load_state_dict(spread),
        "assigned": lambda layer: layer.load_state_dict(spread, assign=True),
        "whole": lambda layer: set_model_state_dict(layer, dict(whole), options=full),
        "broadcast": lambda layer: set_model_state_dict(layer, dict(of_first), options=broadcast),
        "dcp": lambda layer: dcp.load(layer.state_dict(), checkpoint_id=path),
        "data": lambda layer: setattr(local_tensor(layer.weight), "data", local_tensor(spread["weight"])),
    }


def layer_in_state(state: str, layer: nn.Module, over: DeviceMesh) -> nn.Module:
    """Sharded, of a weight that keeps what it is quantized from: freshly made, without values, or after a step."""
    fsdp2.fully_shard(layer.to("meta" if state == "empty" else testing.device()), mesh=over)
    local_tensor(layer.weight).keep_initial = True
    if state == "empty":
        layer.to_empty(device=testing.device())
    if state == "stepped":
        layer.weight.grad = torch.ones_like(layer.weight)
        optim.FusedAdam(layer.parameters(), lr=1e-3).step()
        assert local_tensor(layer.weight).get_high_precision_init_val() is None
    return layer


def keep_however_loaded(rank: int, world: int, path: str) -> None:
    over = testing.mesh((world,), ("dp",))
    for make, values in ((Layer, random_matrix(96, COLS, 3)), (Experts, random_group(3, members=4))):
        ways = ways_to_load(values.to(testing.device()), over, f"{path}/{make.__name__}")
        for name, state, way in itertools.product(SOME, ("fresh", "empty", "stepped"), ways):
            layer = layer_in_state(state, make(FORMATS[name], values.flip(0)), over)
            with torch.no_grad():
                ways[way](layer)
            local, told = local_tensor(layer.weight), f"{make.__name__}, {name}, {state}, {way}"
            if local.numel():
                assert local.storage.initial is not None, f"nothing is kept: {told}"
                want = local_part(values, layer.weight)
                assert_bitwise(local.get_high_precision_init_val(), want, f"what is kept: {told}")


def test_values_are_kept_however_they_are_loaded(ranks, tmp_path: Path) -> None:
    ranks(3).run(keep_however_loaded, str(tmp_path))


def sharing(world: int, seed: int) -> nn.Module:
    """Two layers of one weight, which has two names."""
    layers = nn.Sequential(*(Layer(FORMATS["float8_tensorwise"], random_matrix(96, COLS, seed)) for _ in range(2)))
    layers[1].weight = layers[0].weight
    fsdp2.fully_shard(layers.to(testing.device()), mesh=testing.mesh((world,), ("dp",)))
    return layers


def save_shared(rank: int, world: int, path: str) -> None:
    dcp.save(sharing(world, 3).state_dict(), checkpoint_id=path)


def load_shared(rank: int, world: int, path: str) -> None:
    layers = sharing(world, 4)
    dcp.load(layers.state_dict(), checkpoint_id=path)
    weight, values = layers[0].weight, random_matrix(96, COLS, 3)
    assert_bitwise(local_tensor(weight).get_high_precision_init_val(), local_part(values, weight), "what was quantized")


def test_a_weight_that_modules_share_keeps_what_was_quantized_on_all_ranks(ranks, tmp_path: Path) -> None:
    ranks(2).run(save_shared, str(tmp_path))
    ranks(3).run(load_shared, str(tmp_path))


class LosesAFile(dcp.FileSystemReader):
    """Ends after one of the pieces that a rank reads."""

    def __init__(self, path: str, last: bool) -> None:
        super().__init__(path)
        self._read = slice(-1, None) if last else slice(1)

    def read_data(self, plan: dcp.planner.LoadPlan, planner: dcp.LoadPlanner) -> torch.futures.Future[None]:
        super().read_data(replace(plan, items=plan.items[self._read]), planner)
        raise OSError("a file is lost")


def load_after_a_failure(rank: int, world: int, path: str) -> None:
    """Each piece that a failed load leaves behind could stand for one of the next load."""
    over, device = testing.mesh((world,), ("dp",)), testing.device()
    wrong, right = (random_matrix(96, COLS, seed).to(device) for seed in (3, 4))
    for values, where in ((wrong, "wrong"), (right, "right")):
        dcp.save({"weight": distribute_tensor(values, over, [Shard(1)])}, checkpoint_id=f"{path}/{where}")
    for name, format in FORMATS.items():
        for last in (False, True):
            layer = layer_in_state("fresh", Layer(format, random_matrix(96, COLS, 1)), over)
            with pytest.raises(CheckpointException, match="a file is lost"):
                dcp.load(layer.state_dict(), storage_reader=LosesAFile(f"{path}/wrong", last))
            dcp.load(layer.state_dict(), checkpoint_id=f"{path}/right")
            fsdp2.settle(layer)
            want, got = quantized_part(right, layer.weight), local_tensor(layer.weight)
            for field, buffer in got.storage.buffers.items():
                assert_bitwise(buffer, want.buffers[field], f"{name}: {field} of rank {rank}, last={last}")
            assert_bitwise(got.get_high_precision_init_val(), local_part(right, layer.weight).cpu(), f"kept of {name}")


def test_a_load_begins_anew_after_one_that_failed(ranks, tmp_path: Path) -> None:
    ranks(2).run(load_after_a_failure, str(tmp_path))


@pytest.mark.parametrize("name", FORMATS)
def test_pieces_that_overlap_are_of_different_loads(name: str) -> None:
    weight = Layer(FORMATS[name], random_matrix(128, COLS, 1)).weight.data
    values = random_matrix(128, COLS, 3)
    shard = weight.__get_tensor_shard__(MetadataIndex("weight"))
    shard[:64].copy_(torch.ones(64, COLS))  # and that is all of the first load
    shard[:96].copy_(values[:96])
    shard[96:].copy_(values[96:])
    want = wires(quantize(values, FORMATS[name]))
    for field, buffer in wires(weight).items():
        assert_bitwise(buffer, want[field], field)


def settle_and_keep(rank: int, world: int) -> None:
    """Matrices whose scales are shared, and experts cut along rows; settled at once, and by a gather."""
    for layer in layers_to_settle(world):
        values = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(3)).to(testing.device())
        for by_gather in (False, True):
            local_tensor(layer.weight).keep_initial = True
            spread = distribute_tensor(values, layer.weight.device_mesh, layer.weight.placements)
            with torch.no_grad():
                layer.weight.copy_(spread)
            assert local_tensor(layer.weight).storage.unsettled is not None
            _ = layer.unshard() if by_gather else fsdp2.settle(layer)
            layer.reshard()
            assert local_tensor(layer.weight).storage.unsettled is None
            kept = local_tensor(layer.weight).get_high_precision_init_val()
            assert_bitwise(kept, local_tensor(spread).cpu(), f"kept values, by_gather={by_gather}")


def layers_to_settle(world: int) -> list[nn.Module]:
    over = testing.mesh((world,), ("dp",))
    names = [name for name, format in FORMATS.items() if any(format[d].codec.amax_tiles for d in format.directions)]
    matrices = [Layer(FORMATS[name], random_matrix(96, COLS, 1)) for name in names]
    made = [*matrices, Experts(FORMATS["float8_tensorwise"], random_group(2))]
    for layer in made:
        layer.to(testing.device())
        by_rows = (lambda param: Shard(1)) if isinstance(layer, Experts) else None
        fsdp2.fully_shard(layer, mesh=over, shard_placement_fn=by_rows)
    return [layer for layer in made if local_tensor(layer.weight).storage.may_share_scales()]


def test_agreeing_on_scales_keeps_what_was_quantized(ranks) -> None:
    ranks(2).run(settle_and_keep)


def layers_of(name: str, world: int) -> list[nn.Module]:
    """A matrix cut unevenly, and a group of which a rank gets nothing, sharded."""
    format, over = FORMATS[name], testing.mesh((world,), ("dp",))
    rows = 352 if fits(format, 352, world) else 32 * world
    matrix = Layer(format, random_matrix(rows, COLS, 1))
    made = [each.to(testing.device()) for each in (matrix, Experts(format, random_group(2, members=4)))]
    for layer in made:
        fsdp2.fully_shard(layer, mesh=over)
    return made


def bytes_of(layer: nn.Module) -> dict[str, Tensor]:
    storage = local_tensor(layer.weight).storage
    return {name: buffer.clone() for name, buffer in storage.buffers.items()}


def check_whole_state(rank: int, world: int) -> None:
    """A whole state dict of quantized tensors is cut in bytes, also into columns; broadcast it goes as values."""
    for name in FORMATS:
        for layer in layers_of(name, world):
            want = bytes_of(layer)
            whole = get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True))
            with torch.no_grad():
                local_tensor(layer.weight).fill_(1.0)
            set_model_state_dict(layer, dict(whole), options=StateDictOptions(full_state_dict=True))
            for field, buffer in bytes_of(layer).items():
                assert_bitwise(buffer, want[field], f"{name}: {field} of rank {rank}")
            assert local_tensor(layer.weight).storage.unsettled is None
            check_broadcast(layer, whole, rank)


def check_broadcast(layer: nn.Module, whole: dict[str, Tensor], rank: int) -> None:
    """Ranks quantize the values that were sent; the first keeps its bytes, where no other has a say in them."""
    values, kept = whole["weight"].dequantize(), bytes_of(layer)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(layer, whole if rank == 0 else {}, options=options)
    fsdp2.settle(layer)
    storage = local_tensor(layer.weight).storage
    if rank or storage.may_share_scales():
        kept = quantized_part(values, layer.weight).buffers
    for field, buffer in storage.buffers.items():
        assert_bitwise(buffer, kept[field], f"{field} of rank {rank} after a broadcast")


def test_a_whole_state_of_quantized_tensors_is_loaded(ranks) -> None:
    ranks(3).run(check_whole_state)


def give_from_first(rank: int, world: int) -> None:
    """As accelerate loads a model that the first rank alone has; plain tensors on the others."""
    over = testing.mesh((world,), ("dp",))
    for name, format in FORMATS.items():
        rows = 330 if fits(format, 330, world) else 288
        makes = [(Layer(format, random_matrix(rows, COLS, 1)), quantize)]
        makes.append((Experts(format, random_group(1, members=4)), grouped.quantize))
        for layer, make in makes:
            whole = layer.weight.data.to(testing.device())
            values = whole.dequantize()
            fsdp2.fully_shard(layer.to("meta"), mesh=over)
            given = whole if rank == 0 else torch.zeros_like(values)
            dist.broadcast(given, 0)
            spread = distribute_tensor(given, over, layer.weight.placements)
            layer.load_state_dict({"weight": spread}, assign=True)
            layer.unshard()
            assert_bitwise(layer.weight.dequantize(), make(values, format).dequantize(), name)
            layer.reshard()
            kept = bytes_of(layer)
            set_model_state_dict(layer, get_model_state_dict(layer))  # each rank its own, whoever had the values first
            assert local_tensor(layer.weight).storage.unsettled is None
            for field, buffer in bytes_of(layer).items():
                assert_bitwise(buffer, kept[field], f"{name}: {field} of rank {rank}")


def test_weights_that_the_first_rank_has_are_given_to_all(ranks) -> None:
    ranks(3).run(give_from_first)


def check_distributed(rank: int, world: int) -> None:
    """distribute_tensor sends what the first rank has, whatever the others hold."""
    over = testing.mesh((world,), ("dp",))
    for name, format in FORMATS.items():
        for dim, values in ((0, random_matrix(64, 96, 1)), (1, random_matrix(64, 96, 1)), (0, random_group(1))):
            make = quantize if values.dim() == 2 else grouped.quantize
            mine = make(values.to(testing.device()) * (rank + 1), format)
            got = distribute_tensor(mine, over, [Shard(dim)])
            want = make(values.to(testing.device()), format).chunk(world, dim)[rank].storage
            for field, buffer in want.buffers.items():
                assert_bitwise(local_tensor(got).storage.buffers[field], buffer, f"{name}: {field}, dim {dim}")


def test_what_the_first_rank_has_is_distributed_in_bytes(ranks) -> None:
    ranks(2).run(check_distributed)
