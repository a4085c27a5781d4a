"""What keeps a checkpoint from being written."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

import te_dist as te
from te_dist import optim, recipe
from te_dist.launch.finite import not_finite
from te_dist.tensor import QuantizedTensor

pytestmark = pytest.mark.usefixtures("own_process")
DELAYED = recipe.DelayedScaling()


def trained(how: recipe.Recipe) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A map after a step."""
    with te.quantized_model_init(recipe=how):
        model = te.Linear(128, 128)
    te.prepare(model, how)
    optimizer = optim.FusedAdam(model.parameters(), lr=1e-3)
    with te.autocast(recipe=how):
        model(torch.ones(128, 128)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(autouse=True)
def one_rank() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def found(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    return not_finite(dict(model.named_parameters()), optimizer, dict(model.named_buffers()))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scales_count_beside_masters(value: float) -> None:
    model, optimizer = trained(recipe.Float8BlockScaling())
    assert found(model, optimizer) is None
    assert isinstance(model.weight, QuantizedTensor)
    scale = next(each for each in model.weight.storage.buffers.values() if each.is_floating_point())
    scale.view(-1)[0] = value
    assert found(model, optimizer) == "weight"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scales_of_histories_count_and_amaxes_do_not(value: float) -> None:
    model, optimizer = trained(DELAYED)
    scaling = model.gemm.scaling
    scaling.amax_history.fill_(value)
    assert found(model, optimizer) is None
    scaling.scale.view(-1)[0] = value
    assert found(model, optimizer) == "gemm.scaling.scale"
