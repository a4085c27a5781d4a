"""Weights of groups lie in one buffer: what that means to those who write and exchange one of them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import te_dist as te
from te_dist import recipe
from te_dist.nn import forgotten
from te_dist.testing import assert_bitwise

made_by = recipe.Float8BlockScaling()


def quantized(enabled: bool = True) -> AbstractContextManager[None]:
    return te.quantized_model_init(enabled=enabled, recipe=made_by)


def num_bytes(value: object) -> int:
    torch.save(value, buffer := BytesIO())
    return buffer.tell()


@pytest.mark.parametrize("is_quantized", [False, True])
def test_one_weight_is_written_with_the_memory_of_all_unless_it_is_cloned(is_quantized: bool) -> None:
    with quantized(is_quantized):
        module = te.GroupedLinear(8, 128, 128, bias=False)
    every = num_bytes(module.state_dict())
    assert num_bytes(module.weight0) > every / 2
    assert num_bytes(module.weight0.detach().clone()) < every / 3


def test_safetensors_write_states(tmp_path: Path) -> None:
    module, other = te.GroupedLinear(2, 128, 128), te.GroupedLinear(2, 128, 128)
    with pytest.raises(RuntimeError, match="weight0"):
        safetensors.torch.save_model(module, str(tmp_path / "model.safetensors"))
    safetensors.torch.save_file(module.state_dict(), tmp_path / "model.safetensors")
    te.checkpoints.import_safetensors(other, tmp_path)
    for name, value in module.state_dict().items():
        assert_bitwise(other.state_dict()[name], value, name)


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


def test_one_quantized_weight_is_not_parametrized_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgotten, "_has_warned_of_plain", True)  # it is meant
    x, sizes = torch.ones(4, 128), [2, 2]
    for enabled, groups in ((False, [1]), (True, [0, 1]), (True, [1])):
        with quantized(enabled):
            module = te.GroupedLinear(2, 128, 128)
        for group in groups:
            parametrize.register_parametrization(module, f"weight{group}", Halved())
        with te.autocast(recipe=made_by):
            if enabled and len(groups) == 1:
                with pytest.raises(ValueError, match="weights of one GroupedLinear have one format, or are all plain"):
                    module(x, sizes)
            else:
                assert module(x, sizes).shape == (4, 128)
