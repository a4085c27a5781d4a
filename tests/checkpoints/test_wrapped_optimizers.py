"""Optimizers inside of those of libraries, which pass their groups and their state on: as if they came alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import te_dist as te
from te_dist import checkpoints, optim, recipe
from te_dist.checkpoints import CheckpointError
from te_dist.checkpoints.optimizer_state import MASTER, unwrapped
from te_dist.testing import assert_bitwise

WHY = "needs accelerate: pip install 'te_dist[hf]'"
Wrap = Callable[[torch.optim.Optimizer], Any]
MAKES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "FusedAdam": lambda m: optim.FusedAdam(m.parameters(), lr=0.1),
    "FusedAdam, bytes": lambda m: optim.FusedAdam(
        m.parameters(), lr=0.1, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8, store_param_remainders=True
    ),
    "MasterWeights": lambda m: optim.MasterWeights(m.parameters(), lambda params: torch.optim.AdamW(params, lr=0.1)),
}


class Passing:
    """A class that forwards whatever it does not have."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def of_its_class(optimizer: torch.optim.Optimizer) -> Any:
    """As Lightning wraps: of both classes, without what a constructor sets."""
    made = type(f"Passing{type(optimizer).__name__}", (Passing, type(optimizer)), {})
    found = made.__new__(made)
    Passing.__init__(found, optimizer)
    return found


@pytest.fixture(params=["accelerate", "twice", "forwarding", "of its class"])
def wrap(request: pytest.FixtureRequest) -> Iterator[Wrap]:
    if request.param == "forwarding":
        yield Passing
    elif request.param == "of its class":
        yield of_its_class
    else:
        accelerate = pytest.importorskip("accelerate", reason=WHY)
        accelerator = accelerate.Accelerator(cpu=True)
        yield accelerator.prepare if request.param == "accelerate" else lambda own: Passing(accelerator.prepare(own))
        importlib.import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)


def made(seed: int = 0) -> te.Linear:
    torch.manual_seed(seed)
    with te.quantized_model_init(recipe=recipe.Float8BlockScaling()):
        return te.Linear(256, 128, params_dtype=torch.bfloat16)


def train(model: nn.Module, optimizer: Any, *turns: int) -> None:
    for turn in turns:
        for number, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * turn + number)
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


@pytest.mark.parametrize("name", MAKES)
def test_weights_that_were_put_back_are_what_is_exported(name: str, wrap: Wrap, tmp_path: Path) -> None:
    """As the best ones are, at the end."""
    model = made()
    optimizer = MAKES[name](model)
    wrapped = wrap(optimizer)
    train(model, wrapped, 0)
    best = {key: value.detach().clone() * 1.0 for key, value in model.state_dict().items()}  # values, of no master
    train(model, wrapped, 1, 2)
    last = optimizer.state[model.weight][MASTER].clone()
    model.load_state_dict(best)
    want = model.weight.detach().dequantize(dtype=torch.float32)
    found = checkpoints.high_precision_state_dict(model, optimizer=wrapped, dtype=torch.float32)["weight"]
    assert_bitwise(found, want, "state dict")
    assert not torch.equal(found, last)
    checkpoints.export_safetensors(model, tmp_path, optimizer=wrapped, dtype=torch.float32)
    assert_bitwise(load_file(tmp_path / "model.safetensors")["weight"], want, "file")


@pytest.mark.parametrize("name", MAKES)
def test_checkpoints_are_those_of_the_optimizer_inside(name: str, wrap: Wrap, tmp_path: Path) -> None:
    model = made()
    own = MAKES[name](model)
    wrapped = wrap(own)
    train(model, wrapped, 0, 1)
    checkpoints.save(tmp_path / "wrapped", model=model, optimizer=wrapped)
    checkpoints.async_save(tmp_path / "bare", model=model, optimizer=own).result()
    train(model, wrapped, 2)
    state = {key: value.clone() for key, value in own.state[model.weight].items()}
    for place, is_new, wraps in (("wrapped", True, False), ("bare", True, True), ("wrapped", False, True)):
        twin = made(seed=1) if is_new else model
        other = MAKES[name](twin) if is_new else own
        given = (wrap(other) if is_new else wrapped) if wraps else other
        checkpoints.load(tmp_path / place, model=twin, optimizer=given)
        train(twin, given, 2)
        assert torch.equal(twin.weight.detach(), model.weight.detach())
        for key, value in state.items():
            assert_bitwise(other.state[twin.weight][key], value, f"{key} from {place}")


def test_only_what_passes_state_and_groups_on_is_taken_off() -> None:
    """What has state of its own keeps it, as a lookahead does; masters are of `MasterWeights` alone."""
    model = made()
    inner = optim.FusedAdam(model.parameters())
    lookahead = Passing(inner)
    lookahead.state = {}
    assert unwrapped(lookahead) is lookahead
    regrouped = Passing(inner)
    regrouped.param_groups = list(inner.param_groups)
    assert unwrapped(regrouped) is regrouped
    for own in (inner, MAKES["MasterWeights"](model), torch.optim.lr_scheduler.ConstantLR(inner), None):
        assert unwrapped(own) is own


def test_another_optimizer_inside_is_refused_by_its_name(tmp_path: Path) -> None:
    model = made()
    checkpoints.save(tmp_path / "c", model=model, optimizer=MAKES["MasterWeights"](model))
    with pytest.raises(CheckpointError, match=r"of te_dist.optim.master_weights.*wanted te_dist.optim.fused_adam"):
        checkpoints.load(tmp_path / "c", model=model, optimizer=Passing(MAKES["FusedAdam"](model)))
