"""Bytes that a step gathers, of weights and of experts that other ranks have too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from te_dist import fsdp2, testing
from te_dist.launch import measure
from te_dist.nn.moe import ExpertParallel, MoE, Routing

HIDDEN, EXPERTS = 128, 4


class Blocks(nn.Module):
    """One block with experts, as a job names them."""

    def __init__(self) -> None:
        super().__init__()
        mixture = MoE(HIDDEN, HIDDEN, Routing(EXPERTS, 2), params_dtype=torch.bfloat16, device=testing.device())
        self.blocks = nn.ModuleList([mixture])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.blocks[0](x)


def gathered(rank: int, world: int, edp: int) -> tuple[int, int]:
    mesh = testing.mesh((edp, world // edp), ("edp", "ep"))
    everyone = init_device_mesh(testing.device().type, (world,), mesh_dim_names=("dp",))
    model = Blocks()
    if mesh["ep"].size() > 1:
        parallelize_module(model.blocks[0], mesh["ep"], ExpertParallel())
    fsdp2.fully_shard(model.blocks[0].experts, mesh=mesh["edp"])
    fsdp2.fully_shard(model.blocks[0], mesh=everyone)
    fsdp2.fully_shard(model, mesh=everyone)
    x = torch.randn(8, HIDDEN, dtype=torch.bfloat16, device=testing.device(), requires_grad=True)
    with fsdp2.count_traffic(model) as counted:
        model(x).sum().backward()
    gathered = counted.nbytes(fsdp2.Purpose.FORWARD_GATHER, fsdp2.Purpose.BACKWARD_GATHER)
    return gathered, measure.plain_gathered_bytes(model, 1)


@pytest.mark.parametrize(("edp", "ep"), [(2, 1), (2, 2), (1, 2)])
def test_experts_that_are_gathered_are_counted(ranks: Callable, edp: int, ep: int) -> None:
    router, experts = EXPERTS * HIDDEN, EXPERTS * 3 * HIDDEN * HIDDEN
    wanted = 2 * 2 * (router + (experts // ep if edp > 1 else 0))  # twice, in bf16
    assert ranks(edp * ep).run(gathered, edp) == [(wanted, wanted)] * (edp * ep)
