"""Weights that tensor parallelism cuts into unequal parts: put together by all ranks, or refused by all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from te_dist import fsdp2, testing
from te_dist.catalog import FORMATS
from te_dist.tensor import QuantizedTensor, quantize
from te_dist.tensor_parallel.cutting import cut_parameter
from te_dist.testing import assert_bitwise

K = 64
UNEVEN = {2: (33, 1), 3: (50, 2, 1), 4: (50, 5)}  # rows, by the number of ranks; some have none


class Holder(nn.Module):
    """A module with one weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def whole(name: str, rows: int, cols: int = K, *, seed: int = 0) -> fsdp2.QuantizedParameter:
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 10**seed
    made = quantize(values.to(testing.device()), FORMATS[name])
    return fsdp2.QuantizedParameter(made.storage, made.shape)


def check_same(got: DTensor | QuantizedTensor, want: QuantizedTensor) -> None:
    local = got.to_local() if isinstance(got, DTensor) else got
    assert local.shape == want.shape
    assert torch.equal(local, want), "the bytes are others"


def put_together(rank: int, world: int, name: str) -> None:
    mesh = testing.mesh((world,), ("tp",))
    for rows in UNEVEN[world]:
        want = whole(name, rows)
        module = Holder(cut_parameter(nn.Parameter(want), mesh, dim=0, name="weight"))
        check_same(module.weight.full_tensor(), want)
        again = module.weight.detach().clone().redistribute(placements=[Replicate()])
        check_same(again, want)
        parts = [each.to_local().dequantize() for each in (again.redistribute(placements=[Shard(0)]), module.weight)]
        assert_bitwise(*parts, "parts that are cut again")
        states = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
        check_same(states["weight"].to(testing.device()), want)


@pytest.mark.parametrize("name", ["float8_tensorwise", "float8_block_2d", "mxfp8_1d"])
@pytest.mark.parametrize("world", UNEVEN)
def test_parts_along_rows_are_put_together(ranks, world: int, name: str) -> None:
    ranks(world).run(put_together, name)


def put_together_twice(rank: int, world: int, name: str) -> None:
    mesh = testing.mesh((2, 2), ("dp", "tp"))
    for rows in (50, 33, 3):
        want = whole(name, rows)
        module = Holder(cut_parameter(nn.Parameter(want), mesh["tp"], dim=0, name="weight"))
        fsdp2.fully_shard(module, mesh=mesh["dp"])
        check_same(module.weight.full_tensor(), want)


@pytest.mark.parametrize("name", ["float8_tensorwise", "mxfp8_1d"])
def test_parts_that_fsdp_cuts_again_are_put_together(ranks, name: str) -> None:
    ranks(4).run(put_together_twice, name)


def load(rank: int, world: int, path: Path) -> None:
    mesh = testing.mesh((world,), ("tp",))
    saved, target = (whole("float8_tensorwise", 2, seed=seed) for seed in (1, 2))
    parts = [cut_parameter(nn.Parameter(each), mesh, dim=0, name="weight") for each in (saved, target)]
    dcp.save({"weight": parts[0]}, checkpoint_id=path)
    dcp.load({"weight": parts[1]}, checkpoint_id=path)
    check_same(parts[1].full_tensor(), saved)


def test_a_rank_without_rows_takes_the_scale_that_others_have_loaded(ranks, tmp_path: Path) -> None:
    ranks(3).run(load, tmp_path)


def refuse(rank: int, world: int) -> None:
    mesh = testing.mesh((world,), ("tp",))
    for cols, lengths in ((50, r"\[17, 17, 16\]"), (2, r"\[1, 1, 0\]")):
        want = whole("float8_tensorwise", K, cols)
        for spread in (
            cut_parameter(nn.Parameter(want), mesh, dim=1, name="weight"),
            distribute_tensor(want.detach(), mesh, [Shard(1)], src_data_rank=None),
        ):
            with pytest.raises(NotImplementedError, match=f"the ranks have {lengths} columns, wanted as many on each"):
                spread.full_tensor()


def test_unequal_parts_along_columns_are_refused_by_all(ranks) -> None:
    ranks(3).run(refuse)
