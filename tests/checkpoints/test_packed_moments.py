"""Moments of biases that are packed in a model and separate in a checkpoint, or the other way round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import te_dist as te
from te_dist import checkpoints, optim, recipe
from te_dist.checkpoints import CheckpointError

NUM_GROUPS = 3
REASON = r"moments in bytes have codes where vectors are packed.*single_grouped_bias.*bfloat16 or float32"


def made(*, packs: bool, dtype: torch.dtype) -> tuple[te.GroupedLinear, optim.FusedAdam]:
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=recipe.Float8BlockScaling()):
        module = te.GroupedLinear(
            NUM_GROUPS, 128, 256, single_grouped_weight=packs, single_grouped_bias=packs, params_dtype=torch.bfloat16
        )
    optimizer = optim.FusedAdam(module.parameters(), exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    return module, optimizer


def train(module: te.GroupedLinear, optimizer: optim.FusedAdam) -> None:
    for param in module.parameters():
        param.grad = torch.ones(param.shape, dtype=param.dtype)
    optimizer.step()


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("packs", [False, True])
def test_moments_in_bytes_are_refused_with_the_reason(packs: bool, has_state: bool, tmp_path: Path) -> None:
    saved, other = (made(packs=each, dtype=torch.uint8) for each in (packs, not packs))
    train(*saved)
    if has_state:
        train(*other)
    checkpoints.save(tmp_path / "c", model=saved[0], optimizer=saved[1])
    here, there = ("separate", "packed") if packs else ("packed", "separate")
    with pytest.raises(CheckpointError, match=rf"bias\d? is {there} in it.*wanted {here}: {REASON}") as refused:
        checkpoints.load(tmp_path / "c", model=other[0], optimizer=other[1])
    assert "use the same options" not in str(refused.value)


def test_other_options_are_told_of_as_such(tmp_path: Path) -> None:
    saved, other = made(packs=True, dtype=torch.uint8), made(packs=True, dtype=torch.float32)
    train(*saved)
    train(*other)
    checkpoints.save(tmp_path / "c", model=saved[0], optimizer=saved[1])
    with pytest.raises(CheckpointError, match=r"bias has optimizer state .*use the same options"):
        checkpoints.load(tmp_path / "c", model=other[0], optimizer=other[1])


@pytest.mark.parametrize("packs", [False, True])
def test_moments_in_bfloat16_go_from_one_to_the_other(packs: bool, tmp_path: Path) -> None:
    saved, other = (made(packs=each, dtype=torch.bfloat16) for each in (packs, not packs))
    train(*saved)
    checkpoints.save(tmp_path / "c", model=saved[0], optimizer=saved[1])
    checkpoints.load(tmp_path / "c", model=other[0], optimizer=other[1])
    whole, parts = saved if packs else other, other if packs else saved
    for index in range(NUM_GROUPS):
        got = parts[1].state[getattr(parts[0], f"bias{index}")]["exp_avg"]
        assert torch.equal(got, whole[1].state[whole[0].bias]["exp_avg"][index])
