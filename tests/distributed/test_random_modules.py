"""Modules that a seed draws, sharded by FSDP2 and trained on two ranks of the same tokens: the bits of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from te_dist import fsdp2, testing
from te_dist.optim import FusedAdam
from te_dist.testing import assert_bitwise, full_tensor
from tests.nn.random_modules import Drawn, draw

FEW, TOGETHER = 5, 20
BLOCKS = [block if block < FEW else pytest.param(block, marks=pytest.mark.exhaustive) for block in range(50)]


def trained(drawn: Drawn, module: nn.Module) -> list[dict[str, Tensor]]:
    """What two passes have, with a step in between."""
    optimizer = FusedAdam(module.parameters(), lr=1e-2)
    found = []
    for _ in range(2):
        found.append({name: full_tensor(value).clone() for name, value in drawn.run(module, "cpu").items()})
        optimizer.step()
    return found


def compare(rank: int, world: int, seeds: range) -> int:
    """How many of the modules can be made and cut; each is trained both ways."""
    mesh, compared = testing.mesh((world,), ("dp",)), 0
    for seed in seeds:
        drawn = draw(seed)
        if drawn.dtype == torch.float16:  # the mean is a sum of halves, those of the smallest numbers are rounded
            continue
        drawn.wants = (drawn.wants[0], True)
        try:
            want = trained(drawn, drawn.build("cpu"))
            module = drawn.build("cpu")
            fsdp2.fully_shard(
                module, mesh=mesh, recompute=drawn.checkpoint, reshard_after_forward=(None, True, False)[seed % 3]
            )
        except (NotImplementedError, ValueError):  # on every rank alike
            continue
        compared += 1
        for number, (got, its) in enumerate(zip(trained(drawn, module), want, strict=True)):
            assert got.keys() == its.keys(), drawn
            for name, value in got.items():
                assert_bitwise(value, its[name], f"{name} of pass {number} of seed {seed}: {drawn}")
    return compared


@pytest.mark.gloo_only("it is what a process computes on a CPU that is compared")
@pytest.mark.parametrize("block", BLOCKS)
def test_sharded_modules_train_as_whole_ones(ranks: Callable, block: int) -> None:
    torch.manual_seed(0)
    first, second = ranks(2).run(compare, range(block * TOGETHER, (block + 1) * TOGETHER))
    assert first == second
    assert first > 0
