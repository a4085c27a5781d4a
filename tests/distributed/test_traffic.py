"""Bytes that a sharded model sends: as counted, as every collective got them, and as computed without running."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from te_dist import fsdp2, optim
from te_dist.fsdp2 import Purpose
from te_dist.tensor.traffic import Traffic
from te_dist.testing import device, mesh
from tests.distributed.probe import FORMATS, SOME, Layer, fits, random_matrix
from tests.distributed.test_grouped_fsdp2 import Experts, placed, random_group

COLS = 160  # a ragged tile of 128
GATHERS = (Purpose.FORWARD_GATHER, Purpose.BACKWARD_GATHER)
BY_WORLD = {3: ("ours", "kept", "recompute"), 4: ("hsdp", "two rows", "members"), 2: ("rows of members",)}


class Model(nn.Module):
    """Two layers, of which one is frozen, a plain parameter and an unused one."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.second = layers
        self.gain, self.unused = (nn.Parameter(torch.ones(COLS + 1, device=device())) for _ in range(2))
        self.second.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).sum() + self.second(x).sum() + self.gain.sum()


def build(name: str, how: str, world: int) -> Model:
    """Sharded over all ranks; weights of 328 or 384 rows, of two, or of six experts."""
    if how in ("members", "rows of members"):
        layers = [Experts(FORMATS[name], random_group(seed).to(device())) for seed in (0, 1)]
    else:
        rows = 2 if how == "two rows" else 328 if fits(FORMATS[name], 328, world) else 384
        layers = [Layer(FORMATS[name], random_matrix(rows, COLS, seed).to(device())) for seed in (0, 1)]
    model = Model(*layers)
    over = mesh((2, 2), ("replicate", "shard")) if how == "hsdp" else mesh((world,), ("dp",))
    options: dict[str, Any] = {"mesh": over, "reshard_after_forward": how != "kept", "recompute": how == "recompute"}
    if how == "hsdp":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in layers:
        fsdp2.fully_shard(layer, shard_placement_fn=placed("rows" if how == "rows of members" else ""), **options)
    fsdp2.fully_shard(model, **options)
    return model


def tokens(rank: int) -> Tensor:
    return random_matrix(4, COLS, rank).to(device()).requires_grad_()


def train_and_count(rank: int, world: int, name: str) -> None:
    """One step of two micro batches."""
    for how in BY_WORLD[world]:
        if how == "two rows" and FORMATS[name].alignment(0) > 1:
            continue
        model = build(name, how, world)
        planned = fsdp2.footprints(model)
        optimizer = optim.FusedAdam([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with fsdp2.count_traffic(model) as counted, Traffic() as traffic:
            for index in range(2):
                model.set_requires_gradient_sync(index == 1)
                model(tokens(rank)).backward()
            optimizer.step()
        assert_counted(counted, traffic, 2 if how == "hsdp" else world)
        assert_planned(counted, planned)
        assert bool(counted.nbytes(Purpose.BACKWARD_GATHER)) == (how != "kept")


def assert_counted(counted: fsdp2.CountedTraffic, traffic: Traffic, num_shards: int) -> None:
    """What was counted is what collectives were handed."""
    assert counted.nbytes(*GATHERS) == traffic.nbytes("all_gather") * num_shards
    assert counted.nbytes(Purpose.REDUCE_SCATTER) == traffic.nbytes("reduce_scatter")
    assert counted.nbytes(Purpose.ALL_REDUCE, Purpose.OPTIMIZER) == traffic.nbytes("all_reduce")
    assert not counted.nbytes(Purpose.AMAXES)
    assert counted.nbytes(Purpose.FORWARD_GATHER)


def assert_planned(counted: fsdp2.CountedTraffic, planned: fsdp2.Unit) -> None:
    """Every parameter, and the whole model, sent for every purpose what was planned, in two micro batches."""
    total = fsdp2.sent_per_step(planned, micro_batches=2)
    for unit in planned.flat():
        for each in unit.parameters:
            wanted = fsdp2.sent_per_step([each], micro_batches=2)
            if each.name == "unused":  # it has no gradient, which nobody knows ahead
                for purpose in (Purpose.REDUCE_SCATTER, Purpose.ALL_REDUCE):
                    total[purpose] -= wanted[purpose]
                    wanted[purpose] = 0
            for purpose, nbytes in wanted.items():
                assert counted.nbytes(purpose, name=each.name) == nbytes, (each.name, purpose)
    assert {purpose: counted.nbytes(purpose) for purpose in total} == total
    assert {name for name, _ in counted.sent} == {each.name for unit in planned.flat() for each in unit.parameters}


@pytest.mark.every_run(name=SOME)
@pytest.mark.each_value
@pytest.mark.parametrize(("name", "world"), [*product(FORMATS, (3,)), *product(SOME, (2, 4))])
def test_counted_bytes_are_those_planned_and_those_sent(ranks: Callable, name: str, world: int) -> None:
    ranks(world).run(train_and_count, name)


def write_and_count(rank: int, world: int) -> None:
    """Amaxes that are agreed on outside of the optimizer; another model's are nobody's; afterwards nothing is told."""
    model, other = (build("float8_block_2d", "ours", world) for _ in range(2))
    with fsdp2.count_traffic(model) as counted, Traffic() as traffic:
        for each in (model, other):
            each.first.weight._local_tensor.copy_(each.first.weight._local_tensor.dequantize())
            fsdp2.settle(each)
    agreed = counted.nbytes(Purpose.AMAXES, name="first.weight")
    assert agreed == counted.nbytes(Purpose.AMAXES, name="") > 0
    assert counted.nbytes() == 2 * agreed == traffic.nbytes("all_reduce")
    model(tokens(rank)).backward()
    fsdp2.settle(model)
    assert counted.nbytes() == 2 * agreed
    lines = str(counted).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["first.weight", "-", "sum"]


def test_agreement_on_written_values_is_counted(ranks: Callable) -> None:
    ranks(3).run(write_and_count)


def accumulate_over_replicas(rank: int, world: int) -> None:
    """Gradients that are not yet reduced over replicas are counted as scattered alone."""
    model = build("mxfp8_2d", "hsdp", world)
    with fsdp2.count_traffic(model) as counted, Traffic() as traffic:
        model.set_requires_all_reduce(False)
        model(tokens(rank)).backward()
    assert counted.nbytes(Purpose.REDUCE_SCATTER) == traffic.nbytes("reduce_scatter") > 0
    assert counted.nbytes(Purpose.ALL_REDUCE) == traffic.nbytes("all_reduce") == 0
    dist.barrier()


def test_reduction_over_replicas_can_be_left_out(ranks: Callable) -> None:
    ranks(4).run(accumulate_over_replicas)


def step_and_count(rank: int, world: int) -> None:
    """A step that fails halfway, then amaxes outside of one; a step of an optimizer inside of another."""
    model = build("float8_block_2d", "ours", world)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = optim.MasterWeights(params, lambda masters: torch.optim.SGD(masters, lr=0.1))
    with fsdp2.count_traffic(model) as counted:
        model(tokens(rank)).backward()
        with pytest.raises(RuntimeError, match="halfway"):
            optimizer.step(fail)
        model.first.weight._local_tensor.copy_(model.first.weight._local_tensor.dequantize())
        fsdp2.settle(model)
    agreed = counted.nbytes(Purpose.AMAXES, name="first.weight")
    assert agreed > 0
    assert not counted.nbytes(Purpose.OPTIMIZER)
    with fsdp2.count_traffic(model) as counted:
        optimizer.step()
    assert counted.nbytes(Purpose.OPTIMIZER, name="first.weight") == agreed
    assert not counted.nbytes(Purpose.AMAXES)


def fail() -> float:
    raise RuntimeError("halfway")


def test_amaxes_are_an_optimizers_inside_of_its_step(ranks: Callable) -> None:
    ranks(3).run(step_and_count)
