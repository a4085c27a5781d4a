"""Selective checkpointing over ranks: a policy that saves collectives changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import te_dist as te
from te_dist.nn.moe import ExpertParallel, MoE, Routing
from te_dist.recipe import Float8BlockScaling
from te_dist.tensor.placement import local_tensor
from te_dist.tensor_parallel import ColumnParallel, RowParallel
from te_dist.testing import assert_bitwise, device, mesh

WIDTH, ROWS = 128, 32
RECIPE = Float8BlockScaling()


def maps(over: DeviceMesh, layout: Placement) -> nn.Module:
    model = nn.Sequential(*(te.Linear(WIDTH, WIDTH) for _ in range(4)))
    styles = ColumnParallel(input_layouts=layout), RowParallel(output_layouts=layout)
    return parallelize_module(model, over, {str(i): styles[i % 2] for i in range(4)})


def mixture(over: DeviceMesh, **how: Any) -> nn.Module:
    model = MoE(WIDTH, WIDTH, Routing(4, 2))
    return parallelize_module(model, over, ExpertParallel(**how))


MODELS: dict[str, Callable[[DeviceMesh], nn.Module]] = {
    "tensor": partial(maps, layout=Replicate()),
    "sequence": partial(maps, layout=Shard(0)),
    "copies": mixture,
    "tokens": partial(mixture, travels="tokens"),
    "batches": partial(mixture, travels="batches"),
    "quantized": partial(mixture, payload="quantized"),
    "capacity": partial(mixture, capacity=ROWS),
}


def trained(model: nn.Module, x: Tensor, saved: str) -> list[Tensor]:
    """Output and gradients; without a checkpoint if no ops are saved."""

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if str(op).startswith(saved) else CheckpointPolicy.PREFER_RECOMPUTE

    def run(x: Tensor) -> Tensor:
        with te.autocast(recipe=RECIPE):
            return model(x)

    model.zero_grad()
    x = x.detach().requires_grad_()
    contexts = partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(run, x, use_reentrant=False, context_fn=contexts) if saved else run(x)
    out.square().mean().backward()
    return [out.detach(), x.grad, *(local_tensor(param.grad) for param in model.parameters())]


def collectives_saved(rank: int, world: int, kind: str) -> None:
    torch.manual_seed(0)
    with torch.device(device()):
        model = MODELS[kind](mesh((world,), ("ranks",)))
        x = torch.randn(ROWS, WIDTH)
    want, got = (trained(model, x, saved) for saved in ("", "c10d."))
    for index, pair in enumerate(zip(got, want, strict=True)):
        assert_bitwise(*pair, f"result {index}")


@pytest.mark.parametrize("kind", MODELS)
def test_a_policy_that_saves_collectives_changes_no_bit(kind: str, ranks) -> None:
    ranks(2).run(collectives_saved, kind)
