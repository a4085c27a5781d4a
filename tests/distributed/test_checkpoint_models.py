"""Checkpoints of models built as users build them: recipe, meta device, FSDP2, materialize, FusedAdam."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import te_dist as te
from te_dist import checkpoints, fsdp2, optim, recipe
from te_dist.testing import device, mesh

RECIPES = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}


def build(name: str, over: DeviceMesh, seed: int) -> tuple[nn.Module, optim.FusedAdam]:
    with te.quantized_model_init(recipe=RECIPES[name]), torch.device("meta"):
        model = nn.Sequential(*(te.LayerNormLinear(128, 128) for _ in range(2)), te.Linear(128, 256))
    for block in model:
        fsdp2.fully_shard(block, mesh=over)
    fsdp2.fully_shard(model, mesh=over)
    fsdp2.materialize(model, device=device(), seed=seed)
    return model, optim.FusedAdam(model.parameters(), lr=0.01)


def steps(name: str, model: nn.Module, optimizer: optim.FusedAdam, first: int, count: int) -> list[float]:
    """Losses of `count` optimizer steps; every rank sees the same data, so that they do not depend on the world."""
    losses = []
    for step in range(first, first + count):
        x = torch.randn(32, 128, generator=torch.Generator().manual_seed(step)).to(device())
        with te.autocast(recipe=RECIPES[name]):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_halfway(rank: int, world: int, path: Path, name: str) -> list[float]:
    model, optimizer = build(name, mesh((world,), ("dp",)), seed=1)
    steps(name, model, optimizer, 0, 2)
    rng = torch.get_rng_state()
    checkpoints.save(path, model=model, optimizer=optimizer, extra={"step": 2, "rng": rng})
    return steps(name, model, optimizer, 2, 3)


def resume(rank: int, world: int, path: Path, name: str) -> list[float]:
    model, optimizer = build(name, mesh((world,), ("dp",)), seed=2)
    extra = checkpoints.load(path, model=model, optimizer=optimizer)
    torch.set_rng_state(extra["rng"])
    return steps(name, model, optimizer, extra["step"], 3)


@pytest.mark.parametrize("name", RECIPES)
def test_losses_go_on_as_if_nothing_had_happened(ranks, tmp_path: Path, name: str) -> None:
    want = ranks(2).run(save_halfway, tmp_path / "c", name)
    assert ranks(2).run(resume, tmp_path / "c", name) == want
    (loss, *_) = ranks(4).run(resume, tmp_path / "c", name)
    # The first loss is that of the very bytes; later ones sum gradients in another order.
    assert loss[0] == want[0][0]
