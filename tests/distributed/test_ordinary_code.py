"""Code that knows nothing of quantized shards: state dictionaries, whole tensors, copies between models."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Shard

from te_dist import fsdp2
from te_dist.tensor import QuantizedTensor, quantize
from te_dist.tensor.placement import local_tensor
from te_dist.testing import assert_bitwise, mesh, pool
from tests.distributed.probe import FORMATS, Layer, assert_seen, fits, random_matrix, wires

COLS = 160


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


def evaluate_first(rank: int, world: int, name: str) -> None:
    layer = sharded(name, 96, world)
    for _ in range(2):
        with torch.inference_mode():
            layer(random_matrix(4, COLS, 1))
        layer(random_matrix(4, COLS, 1).requires_grad_()).sum().backward()
        assert_seen(layer, random_matrix(96, COLS, 0), backward=True)


@pytest.mark.parametrize("name", ["float8_block_2d", "float8_tensorwise_tn", "mxfp8_1d", "nvfp4_1d"])
def test_the_first_pass_may_be_one_in_inference_mode(name: str) -> None:
    pool(2).run(evaluate_first, name)


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


def gather_columns(rank: int, world: int) -> str:
    part = quantize(random_matrix(64, COLS * 2, 0), FORMATS["float8_block_2d"]).split(COLS, dim=1)[rank]
    weight = DTensor.from_local(part, mesh((world,), ("tp",)), [Shard(1)], run_check=False)
    with pytest.raises(NotImplementedError, match="columns") as error:
        weight.full_tensor()
    return str(error.value)


def test_columns_are_refused_on_every_rank() -> None:
    first, second = pool(2).run(gather_columns)
    assert first == second


def save_by_torch(rank: int, world: int, name: str, path: str) -> None:
    dcp.save({"model": get_model_state_dict(sharded(name, 384, world))}, checkpoint_id=path)


def load_by_torch(rank: int, world: int, name: str, path: str, refused: bool) -> None:
    layer = sharded(name, 384, world, seed=1)
    state = {"model": get_model_state_dict(layer)}
    if refused:
        with pytest.raises(CheckpointException, match="te_dist.checkpoints"):
            dcp.load(state, checkpoint_id=path)
        return
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(layer, state["model"])
    layer(random_matrix(4, COLS, 1))
    assert_seen(layer, random_matrix(384, COLS, 0), backward=False)


@pytest.mark.parametrize("name", FORMATS)
def test_torchs_own_checkpoints_load_on_the_same_ranks_and_are_refused_on_others(name: str, tmp_path: Path) -> None:
    pool(2).run(save_by_torch, name, str(tmp_path))
    pool(2).run(load_by_torch, name, str(tmp_path), False)
    pool(3).run(load_by_torch, name, str(tmp_path), True)
