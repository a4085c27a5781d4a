"""Code that knows nothing of quantized shards: state dictionaries, whole tensors, copies between models."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

from te_dist import checkpoints, fsdp2, optim
from te_dist._torch_private import sharded_of
from te_dist.tensor import QuantizedTensor, quantize
from te_dist.tensor.placement import local_part, local_tensor
from te_dist.testing import assert_bitwise, mesh, pool
from tests.distributed.probe import FORMATS, Layer, assert_seen, fits, random_matrix, wires

COLS = 160
UNEVEN = 352  # rows, over three ranks


def sharded(name: str, rows: int, world: int, seed: int = 0) -> Layer:
    layer = Layer(FORMATS[name], random_matrix(rows, COLS, seed))
    fsdp2.fully_shard(layer, mesh=mesh((world,), ("dp",)))
    return layer


def gather_whole(rank: int, world: int, name: str, rows: int) -> None:
    layer, want = sharded(name, rows, world), quantize(random_matrix(rows, COLS, 0), FORMATS[name])
    whole = layer.weight.full_tensor()
    assert isinstance(whole, QuantizedTensor)
    assert whole.shape == want.shape
    got, wanted = wires(whole), wires(want)
    for field in FORMATS[name].canonical.fields:
        assert_bitwise(got[field.name], wanted[field.name], field.name)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(layer, options=options)
    assert state.keys() == ({"weight"} if rank == 0 else set())
    state = {key: value.dequantize() for key, value in state.items()}
    set_model_state_dict(layer, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    local_tensor(layer.weight).fill_(1.0)
    if local_tensor(layer.weight).storage.unsettled is not None:
        with pytest.raises(RuntimeError, match="settle"):
            layer.weight.full_tensor()


@pytest.mark.each_value
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [352, 2], ids=["uneven", "empty shards"])
def test_the_whole_of_uneven_shards_is_gathered(name: str, rows: int) -> None:
    if not fits(FORMATS[name], rows, 3):
        rows = 96  # equal ones
    pool(3).run(gather_whole, name, rows)


def save_and_load(rank: int, world: int, name: str) -> None:
    first, second = sharded(name, 96, world), sharded(name, 96, world, seed=1)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file))
    second(random_matrix(4, COLS, rank))
    assert_seen(second, random_matrix(96, COLS, 0), backward=False)


@pytest.mark.parametrize("name", ["float8_block_2d", "nvfp4_1d"])
def test_state_of_shards_is_pickled(name: str) -> None:
    pool(2).run(save_and_load, name)


def copy_what_was_quantized_alone(rank: int, world: int, name: str) -> None:
    layer, values = sharded(name, 64, world), random_matrix(64, COLS, 7)
    local = local_tensor(layer.weight)
    rows = local.storage.region.rows
    with torch.no_grad():
        local.copy_(quantize(values[rows.start : rows.stop], FORMATS[name]))
    layer.unshard()
    seen = layer.weight.dequantize()
    everyone = [torch.empty_like(seen) for _ in range(world)]
    dist.all_gather(everyone, seen)
    for other in everyone:
        assert_bitwise(other, seen, "the weight of another rank")


@pytest.mark.parametrize("name", FORMATS)
def test_ranks_agree_on_shards_that_were_quantized_alone(name: str) -> None:
    pool(2).run(copy_what_was_quantized_alone, name)


def evaluate_first(rank: int, world: int, name: str, rows: int) -> None:
    layer = sharded(name, rows, world)
    for _ in range(2):
        with torch.inference_mode():
            layer(random_matrix(4, COLS, 1))
        layer(random_matrix(4, COLS, 1).requires_grad_()).sum().backward()
        assert_seen(layer, random_matrix(rows, COLS, 0), backward=True)


@pytest.mark.each_value
@pytest.mark.parametrize("rows", [96, 100], ids=["even", "uneven"])
@pytest.mark.parametrize("name", ["float8_block_2d", "float8_tensorwise_tn", "mxfp8_1d", "nvfp4_1d"])
def test_the_first_pass_may_be_one_in_inference_mode(name: str, rows: int) -> None:
    pool(3).run(evaluate_first, name, rows)


def move_buffers_of_shards(rank: int, world: int) -> None:
    """Buffers keep their objects and get other memory."""
    for name in FORMATS:
        layer, other = sharded(name, 96, world), sharded(name, 96, world, seed=1)
        layer(random_matrix(4, COLS, rank).requires_grad_()).sum().backward()
        for field, buffer in local_tensor(layer.weight).storage.buffers.items():
            buffer.data = local_tensor(other.weight).storage.buffers[field].clone()
        layer(random_matrix(4, COLS, rank).requires_grad_()).sum().backward()
        for backward in (False, True):
            assert_seen(layer, random_matrix(96, COLS, 1), backward=backward)


def test_what_is_sent_is_what_buffers_hold() -> None:
    pool(2).run(move_buffers_of_shards)


def write_while_gathered(rank: int, world: int) -> None:
    """A gathered weight stays what it was, as a plain one does, whoever writes the shard; its next gather sees that.

    A step frees what was gathered.
    """
    for name in FORMATS:
        layer = sharded(name, 96, world)
        optimizers = [optim.FusedAdam([layer.weight], lr=0.5), optim.MasterWeights([layer.weight], torch.optim.SGD)]
        steps = [each.step for each in optimizers]
        for write in (*steps, partial(double, layer), partial(settle_double, layer)):
            layer(random_matrix(4, COLS, rank).requires_grad_()).sum().backward()
            shard = layer.weight
            layer.unshard()
            before = layer.weight.dequantize()
            write()
            if write not in steps:
                assert_bitwise(layer.weight.dequantize(), before, f"{name}, gathered")
                layer.reshard()
            assert layer.weight is shard
            layer.unshard()
            assert not torch.equal(layer.weight.dequantize(), before)
            layer.reshard()


def double(layer: Layer) -> None:
    """By the shard, which is not the module's own while the whole is."""
    local = local_tensor(sharded_of(layer.weight))
    with torch.no_grad():
        local.mul_(2.0 + dist.get_rank())


def settle_double(layer: Layer) -> None:
    double(layer)
    fsdp2.settle(layer)
    assert local_tensor(sharded_of(layer.weight)).storage.unsettled is None


def test_a_gathered_weight_stays_while_its_shard_is_written() -> None:
    pool(2).run(write_while_gathered)


def write_while_gathering(rank: int, world: int) -> None:
    """A gather gives what the shard held when it began, on one rank what it holds at the end, as that of a plain weight
    does."""
    for name in FORMATS:
        layer = sharded(name, 96, world)
        optimizer = optim.FusedAdam([layer.weight], lr=0.5)
        layer(random_matrix(4, COLS, rank).requires_grad_()).sum().backward()
        layer.unshard()
        before = layer.weight.dequantize()
        layer.reshard()
        gathering = layer.unshard(async_op=True)
        optimizer.step()
        gathering.wait()
        gathered = layer.weight.dequantize()
        layer.reshard()
        layer.unshard()
        assert_bitwise(gathered, before if world > 1 else layer.weight.dequantize(), name)


@pytest.mark.parametrize("world", [1, 2])
def test_a_shard_may_be_written_while_it_is_gathered(world: int) -> None:
    pool(world).run(write_while_gathering)


def write_gathered(rank: int, world: int) -> None:
    """What is written into a gathered weight ends with it, as that of a plain one does."""
    for name in FORMATS:
        layer = sharded(name, 96, world)
        layer.unshard()
        before = layer.weight.dequantize()
        for _ in range(2):
            with torch.no_grad():
                layer.weight.mul_(0.3)
        assert not torch.equal(layer.weight.dequantize(), before), name
        layer.reshard()
        layer.unshard()
        assert_bitwise(layer.weight.dequantize(), before, f"{name}, gathered again")


def test_shards_stay_while_a_gathered_weight_is_written() -> None:
    pool(2).run(write_gathered)


def wrap_again(rank: int, world: int) -> None:
    """What a wrapped model gives as a whole belongs to it no longer."""
    for name in FORMATS:
        layer = sharded(name, 96, world)
        layer.set_reshard_after_forward(True)
        layer(random_matrix(4, COLS, rank).requires_grad_()).sum().backward()
        other = Layer(FORMATS[name], random_matrix(96, COLS, 1))
        other.weight = nn.Parameter(layer.weight.full_tensor())
        del layer
        torch_fully_shard(other, mesh=mesh((world,), ("dp",)), reshard_after_forward=False)
        other(random_matrix(4, COLS, rank).requires_grad_()).sum().backward()
        assert_seen(other, random_matrix(96, COLS, 0), backward=True)


def test_whole_weights_of_a_wrapped_model_are_wrapped_again() -> None:
    pool(2).run(wrap_again)


def copy_gathered(rank: int, world: int) -> None:
    for name in FORMATS:
        layer, file = sharded(name, 96, world), io.BytesIO()
        layer(random_matrix(4, COLS, rank).requires_grad_()).sum().backward()
        layer.unshard()
        weight = layer.weight
        torch.save(weight, file)
        file.seek(0)
        for found in (copy.deepcopy(weight), torch.load(file, weights_only=False)):
            assert torch.equal(found.dequantize(), weight.dequantize())
            assert not found.storage.ways  # they hold buffers of FSDP2, and on a GPU launches


def test_a_gathered_weight_is_copied_and_pickled() -> None:
    pool(2).run(copy_gathered)


def recompute_unannounced(rank: int, world: int) -> str:
    layer = Layer(FORMATS["mxfp8_1d"], random_matrix(96, COLS, 0))
    fsdp2.fully_shard(layer, mesh=mesh((world,), ("dp",)), reshard_after_forward=True)
    y = layer(random_matrix(4, COLS, 1).requires_grad_())
    layer.unshard()
    with pytest.raises(RuntimeError, match="pass recompute=True") as error:
        y.sum().backward()
    return str(error.value)


def test_a_pass_that_needs_what_was_not_gathered_says_so_on_every_rank() -> None:
    first, second = pool(2).run(recompute_unannounced)
    assert first == second


def convert_model(rank: int, world: int, name: str) -> str:
    """Before the first pass it is an ordinary conversion; later FSDP2 would lay bf16 into buffers for fp32."""
    early, late = (sharded(name, 96, world) for _ in range(2))
    early.bfloat16()
    early.unshard()
    assert early.weight.dtype == torch.bfloat16
    late(random_matrix(4, COLS, rank).requires_grad_()).sum().backward()
    late.bfloat16()
    with pytest.raises(RuntimeError, match=r"from torch.float32 to torch.bfloat16 after its first gather") as error:
        late.unshard()
    return str(error.value)


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_that_is_converted_between_passes_says_so_on_every_rank(name: str) -> None:
    first, second = pool(2).run(convert_model, name)
    assert first == second


def gather_columns(rank: int, world: int) -> str:
    whole = quantize(random_matrix(64, COLS * world, 0), FORMATS["float8_block_2d"])
    parts, over = whole.split(COLS, dim=1), mesh((world,), ("tp",))
    weight = DTensor.from_local(parts[rank], over, [Shard(1)], run_check=False)
    # What gathers inside of an op of DTensor comes below torch's autograd, where other ops arrive.
    assert weight.std().item() == whole.dequantize().std().item()
    assert_bitwise(weight.full_tensor().dequantize(), whole.dequantize(), "columns")
    swapped = DTensor.from_local(parts[world - 1 - rank], over, [Shard(1)], run_check=False)
    with pytest.raises(ValueError, match="do not follow each other") as error:
        swapped.full_tensor()
    return str(error.value)


def test_columns_are_gathered_or_refused_on_every_rank_alike() -> None:
    first, second = pool(2).run(gather_columns)
    assert first == second


def save_by_torch(rank: int, world: int, path: str) -> None:
    state = {f"{name}, {rows} rows": layer for name, rows, layer in layers_to_save(world)}
    for rows in (384, 2):
        plain = state[f"plain, {rows} rows"] = nn.Linear(COLS, rows, bias=False)
        with torch.no_grad():
            plain.weight.copy_(random_matrix(rows, COLS, 0))
        torch_fully_shard(plain, mesh=mesh((world,), ("dp",)))
    dcp.save({key: get_model_state_dict(layer) for key, layer in state.items()}, checkpoint_id=path)


def layers_to_save(world: int, seed: int = 0) -> Iterator[tuple[str, int, Layer]]:
    """Of every format: cut through tiles, unevenly where that can be, and with ranks that have no rows."""
    for name in FORMATS:
        for rows in (384, UNEVEN, 2):
            if fits(FORMATS[name], rows, 2) and fits(FORMATS[name], rows, 3):
                yield name, rows, sharded(name, rows, world, seed)


def load_by_torch(rank: int, world: int, path: str) -> None:
    found = list(layers_to_save(world, seed=1))
    state = {f"{name}, {rows} rows": get_model_state_dict(layer) for name, rows, layer in found}
    dcp.load(state, checkpoint_id=path)
    for (name, rows, layer), (_, _, want) in zip(found, layers_to_save(world), strict=True):
        set_model_state_dict(layer, state[f"{name}, {rows} rows"])
        got, wanted = (local_tensor(each.weight).storage for each in (layer, want))
        for field, buffer in wanted.buffers.items():
            assert_bitwise(got.buffers[field], buffer, f"{field} of {name} with {rows} rows")
        assert got.unsettled is None
        if wanted.shape[0]:  # else there are no values to begin with
            assert_bitwise(got.initial, wanted.initial, f"what was quantized of {name} with {rows} rows")


def load_plain_by_torch(rank: int, world: int, path: str) -> None:
    found = [(rows, layer) for _, rows, layer in layers_to_save(world, seed=1) if rows != UNEVEN]
    for rows, layer in found:
        local = local_tensor(layer.weight)
        local.keep_initial, local.storage.initial = True, None  # as after `to_empty`, or a step
        dcp.load({f"plain, {rows} rows": get_model_state_dict(layer)}, checkpoint_id=path)
        kept, values = local.get_high_precision_init_val(), random_matrix(rows, COLS, 0)
        if local.numel():
            assert_bitwise(kept, local_part(values, layer.weight), f"kept of {rows} rows")
        layer(random_matrix(4, COLS, 1))
        assert_seen(layer, values, backward=False)


def load_another_format_by_torch(rank: int, world: int, path: str) -> None:
    """Values are decoded, put together, and quantized once."""
    layer = sharded("mxfp8_1d", 384, world, seed=1)
    dcp.load({"float8_block_2d, 384 rows": get_model_state_dict(layer)}, checkpoint_id=path)
    layer(random_matrix(4, COLS, 1))
    assert_seen(layer, quantize(random_matrix(384, COLS, 0), FORMATS["float8_block_2d"]).dequantize(), backward=False)


def test_torchs_own_checkpoints_load_on_other_ranks(tmp_path: Path) -> None:
    pool(2).run(save_by_torch, str(tmp_path))
    pool(2).run(load_by_torch, str(tmp_path))
    for load in (load_by_torch, load_plain_by_torch, load_another_format_by_torch):
        pool(3).run(load, str(tmp_path))


def save_later_by_torch(rank: int, world: int, path: str) -> None:
    """What is written behind the call is not saved."""
    layers = {f"{name}, {rows} rows": layer for name, rows, layer in layers_to_save(world)}
    state = {key: get_model_state_dict(layer) for key, layer in layers.items()}
    future = dcp.async_save(state, checkpoint_id=path, async_stager=checkpoints.Stager())
    with torch.no_grad():
        for layer in layers.values():
            local_tensor(layer.weight).fill_(1.0)
    future.result()


def test_torchs_own_checkpoints_are_written_in_the_background(tmp_path: Path) -> None:
    pool(2).run(save_later_by_torch, str(tmp_path))
    pool(3).run(load_by_torch, str(tmp_path))


def save_unsettled_by_torch(rank: int, world: int, path: str) -> str:
    layer = sharded("float8_tensorwise", 64, world)
    with torch.no_grad():
        local_tensor(layer.weight).fill_(rank + 1.0)
    with pytest.raises(CheckpointException, match="settle") as error:
        dcp.save(layer.state_dict(), checkpoint_id=path)
    return str(error.value)


def test_shards_with_scales_of_their_own_are_not_saved(tmp_path: Path) -> None:
    first, second = pool(2).run(save_unsettled_by_torch, str(tmp_path))
    assert first == second


def interrupt_loading(rank: int, world: int) -> None:
    """Pieces that were given before a load stopped do not count for the next one."""
    layer, values = sharded("mxfp8_2d", 192, world, seed=1), random_matrix(192, COLS, 0)
    local = local_tensor(layer.weight)
    for attempt in ([0], [0, 1]):
        for half in attempt:
            target = local.__get_tensor_shard__(MetadataIndex("weight"))  # as DCP asks for it
            own = values[96 * rank :][48 * half : 48 * (half + 1)]
            target.narrow(0, 48 * half, 48).detach().copy_(own)
    layer(random_matrix(4, COLS, 1))
    assert_seen(layer, values, backward=False)


def test_a_load_that_stopped_half_way_is_begun_again() -> None:
    pool(2).run(interrupt_loading)
