"""Import of files that TransformerEngine wrote."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import te_dist as te
from te_dist import checkpoints, recipe
from te_dist.checkpoints import foreign
from te_dist.testing import assert_bitwise

EXTRA = ("0._extra_state", "1._extra_state", "1.attention._extra_state")


def model() -> nn.Module:
    return nn.Sequential(te.LayerNormLinear(128, 128), te.LayerNormMLP(128, 128, activation="swiglu"))


@pytest.mark.parametrize("num_bytes", [0, 8])
def test_what_modules_pickled_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(foreign, "_has_warned", False)
    source = model()
    save_file(
        {**source.state_dict(), **{key: torch.ones(num_bytes, dtype=torch.uint8) for key in EXTRA}},
        tmp_path / "model.safetensors",
    )
    with te.quantized_model_init(recipe=recipe.Float8BlockScaling()):
        target = model()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            checkpoints.import_safetensors(target, tmp_path)
    assert ["TransformerEngine pickled" in str(each.message) for each in told] == [True] * bool(num_bytes)
    x = torch.ones(4, 128)
    with te.autocast(recipe=recipe.Float8BlockScaling()):
        assert_bitwise(target(x), source(x), "imported")


def test_what_else_is_in_files_only_is_refused(tmp_path: Path) -> None:
    state = {**model().state_dict(), "0._extra_state.scale": torch.ones(1), "0.extra_state": torch.ones(1)}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(checkpoints.CheckpointError, match="0._extra_state.scale is in .* only; 0.extra_state is in"):
        checkpoints.import_safetensors(model(), tmp_path)


def test_an_extra_state_that_the_model_has_is_read(tmp_path: Path) -> None:
    """An empty one is all that a model may have."""

    class Stateful(nn.Linear):
        def get_extra_state(self) -> torch.Tensor:
            return torch.empty(0)

        def set_extra_state(self, state: torch.Tensor) -> None:
            pass

    source = Stateful(8, 8)
    checkpoints.export_safetensors(source, tmp_path)
    target = Stateful(8, 8)
    checkpoints.import_safetensors(target, tmp_path)
    assert_bitwise(target.weight, source.weight, "imported")
