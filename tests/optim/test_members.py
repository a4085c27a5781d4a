"""What is written into one member of a group of weights is what optimizers go on from; others are as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import te_dist as te
from te_dist import optim, recipe

FP8, MX = recipe.Float8BlockScaling(), recipe.MXFP8BlockScaling()
VALUES = torch.full((128, 256), 2.0)


def _assign(weight: Tensor) -> None:
    weight[1] = VALUES


def _take_bytes(weight: Tensor) -> None:
    other = weight.clone()
    other.copy_(VALUES.expand(4, -1, -1))
    weight[1].copy_(other[1])


WAYS: dict[str, Callable[[Tensor], object]] = {
    "copied": lambda weight: weight[1].copy_(VALUES),
    "assigned": _assign,
    "unbound": lambda weight: weight.unbind()[1].copy_(VALUES),
    "member": lambda weight: weight.members[1].copy_(VALUES),
    "of data": lambda weight: weight.data[1].copy_(VALUES),
    "filled": lambda weight: weight[1].fill_(2.0),
    "initialized": lambda weight: nn.init.constant_(weight[1], 2.0),
    "changed": lambda weight: weight[1].mul_(0).add_(2.0),
    "quantized": lambda weight: weight[1].quantize_(VALUES),
    "bytes": _take_bytes,
}


@pytest.mark.filterwarnings("ignore:.*rounds its result to the codes")
@pytest.mark.parametrize("has_master", (False, True))
@pytest.mark.parametrize("keeps", (False, True))
@pytest.mark.parametrize("made_by", (FP8, MX), ids=("block", "mxfp8"))
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_step_goes_on_from_what_a_member_was_given(way, made_by, keeps, has_master) -> None:
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=made_by, preserve_high_precision_init_val=keeps):
        module = te.GroupedLinear(4, 256, 128, bias=False, single_grouped_weight=True)
    weight, optimizer = module.weight, optim.FusedAdam(module.parameters(), lr=1e-5)
    x = torch.randn(64, 256)

    def step() -> Tensor:
        with te.autocast(recipe=made_by):
            module(x, [16] * 4).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer.state[weight]["master_param"].clone()

    before = step() if has_master else weight.storage.initial
    with torch.no_grad():
        way(weight)
    after = step()
    assert (after[1] - 2).abs().max() < 1e-4 and (weight.dequantize()[1] - 2).abs().max() == 0
    if before is not None:
        others = [0, 2, 3]
        assert (after[others] - before[others]).abs().max() < 1e-4


def test_a_copy_of_a_member_belongs_to_no_group() -> None:
    with te.quantized_model_init(recipe=FP8):
        weight = te.GroupedLinear(4, 256, 128, bias=False, single_grouped_weight=True).weight
    before, writes = weight.dequantize(), weight.storage.num_writes
    with torch.no_grad():
        weight[1].clone().copy_(VALUES)
    assert torch.equal(weight.dequantize(), before) and weight.storage.num_writes == writes
