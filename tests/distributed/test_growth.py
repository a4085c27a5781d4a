"""Nothing grows from step to step: bytes, tensors and objects of a short training are those of a long one."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import te_dist as te
from te_dist import fsdp2, optim, recipe
from te_dist.testing import StorageTracker, mesh, pool
from te_dist.testing.memory import allocated_bytes, storages

RECIPES: dict[str, recipe.Recipe] = {
    "float8_current": recipe.Float8CurrentScaling(),
    "float8_delayed": recipe.DelayedScaling(),
    "float8_block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
WIDTH, ROWS = 64, 32  # each of two ranks has a part of a block
SHORT, LONG = 3, 100
ONCE = 2  # objects of a type that may be made late, such as a thread's context
# What grows now and then grows in twenty steps; the recipes with state of their own and with drawn numbers go on.
STEPS = dict.fromkeys(RECIPES, 20) | {"float8_delayed": LONG, "nvfp4": LONG}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, precision: recipe.Recipe) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with te.autocast(recipe=precision):
        y = model(x)
    y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def living() -> tuple[int, int, int, Counter[str]]:
    """Bytes and number of storages behind all tensors, number of tensors, and objects by their type."""
    gc.collect()
    found = gc.get_objects()
    plain = [each for each in found if issubclass(type(each), Tensor) and type(each) in (Tensor, nn.Parameter)]
    return allocated_bytes(plain), len(storages(plain)), len(plain), Counter(type(each).__name__ for each in found)


def train(rank: int, world: int, name: str, steps: int, *, leak: type | None = None) -> None:
    precision = RECIPES[name]
    with te.quantized_model_init(recipe=precision), torch.device("meta"):
        blocks = [te.LayerNormLinear(WIDTH, WIDTH, normalization="RMSNorm") for _ in range(2)]
        model = nn.Sequential(*blocks)
    over = mesh((world,), ("dp",))
    for block in blocks:
        fsdp2.fully_shard(block, mesh=over)
    fsdp2.fully_shard(model, mesh=over)
    fsdp2.materialize(model, device="cpu", seed=0)
    optimizer = optim.FusedAdam(model.parameters(), lr=1e-3)
    kept = []
    for _ in range(SHORT):
        step(model, optimizer, precision)
    living()  # asking makes objects too, once
    before = living()
    for _ in range(SHORT, steps):
        step(model, optimizer, precision)
        if leak:
            kept.append(leak())
    after = living()
    assert after[:3] == before[:3]
    # One tuple and the Counter are `before`; a tuple of constants is one that the collector follows now and then.
    more = after[3] - before[3] - Counter({"tuple": 2, "Counter": 1})
    grown = {kind: count for kind, count in more.items() if count > ONCE}
    assert not grown, f"more objects after {steps} steps than after {SHORT}: {grown}"
    with StorageTracker() as tracker:  # which sees what C++ holds too
        for _ in range(SHORT):
            step(model, optimizer, precision)
    gc.collect()
    tracker.assert_alive(0)


@pytest.mark.every_run(name=("float8_delayed",))
@pytest.mark.parametrize(("name", "steps"), STEPS.items())
def test_nothing_grows_from_step_to_step(name: str, steps: int) -> None:
    pool(2).run(train, name, steps)


def leak_and_train(rank: int, world: int, kind: type) -> None:
    with pytest.raises(AssertionError):
        train(rank, world, "float8_block", SHORT + 2 * ONCE, leak=kind)


@pytest.mark.parametrize("kind", [Tensor, list])
def test_what_is_kept_at_each_step_is_seen(kind: type) -> None:
    pool(2).run(leak_and_train, kind)
