"""What a collective still fills when autograd saves it is parked as it is once filled."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from te_dist import offload, testing
from te_dist.testing import assert_bitwise

pytestmark = pytest.mark.gloo_only("its inputs are made on the CPU")

ROWS, WIDTH = 4096, 256


def gradient(rank: int, world: int, *, kind: str, offloads: bool) -> Tensor:
    """Of a weight that multiplies rows of all ranks, which the last rank is late to send."""
    over = testing.mesh((world,), ("tp",))
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).chunk(world)[rank]
    weight = torch.ones(WIDTH, 8, requires_grad=True)
    if rank == world - 1:
        time.sleep(0.05)
    with offload.activations(min_bytes=0) if offloads else contextlib.nullcontext() as statistics:
        x = DTensor.from_local(rows, over, [Shard(0)]).redistribute(placements=[Replicate()], async_op=True)
        if kind == "local":
            y = x.to_local() @ weight
        else:
            y = (x @ DTensor.from_local(weight, over, [Replicate()])).to_local()
    assert statistics is None or statistics.parked == ROWS * WIDTH * 4
    y.sum().backward()
    assert weight.grad is not None
    return weight.grad


def check(rank: int, world: int, kind: str) -> None:
    want = gradient(rank, world, kind=kind, offloads=False)
    for _ in range(3):
        assert_bitwise(gradient(rank, world, kind=kind, offloads=True), want, "gradient")


@pytest.mark.parametrize("kind", ["local", "spread"])
def test_rows_on_their_way_are_parked_as_they_arrive(ranks, kind):
    ranks(2).run(check, kind)
