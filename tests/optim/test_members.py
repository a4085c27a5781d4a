"""What is written into one member of a group of weights is what optimizers go on from; others are as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import te_dist as te
from te_dist import grouped, optim, recipe
from te_dist.catalog import FORMATS
from te_dist.testing import assert_bitwise

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


def trained(steps: Callable[[Tensor], object] | None) -> Tensor:
    """The master after some steps, between which something is done with the weight that is undone."""
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=FP8):
        module = te.GroupedLinear(4, 256, 128, bias=False, single_grouped_weight=True)
    optimizer, x = optim.FusedAdam(module.parameters(), lr=1e-5), torch.randn(64, 256)
    for _ in range(5):
        with te.autocast(recipe=FP8):
            module(x, [16] * 4).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if steps is not None:
            with torch.no_grad():
                steps(module.weight)
    return optimizer.state[module.weight]["master_param"]


def _save_members(weight: Tensor) -> None:
    saved = [member.clone() for member in weight.members]
    for member, kept in zip(weight.members, saved, strict=True):
        member.mul_(1.01)
        member.copy_(kept)


def _save_the_group(weight: Tensor) -> None:
    saved = weight.clone()
    for member in weight.members:
        member.mul_(1.01)
    for number in range(4):
        weight[number].copy_(saved[number])


def _give_back_the_same(weight: Tensor) -> None:
    saved = weight.clone()
    weight[2].copy_(saved[2])


@pytest.mark.parametrize("steps", (_save_members, _save_the_group, _give_back_the_same))
def test_a_member_that_is_put_back_has_the_master_it_had(steps) -> None:
    assert_bitwise(trained(steps), trained(None), "the master")


def test_values_may_lie_anyhow_and_have_a_history() -> None:
    with te.quantized_model_init(recipe=FP8, preserve_high_precision_init_val=True):
        module = te.GroupedLinear(4, 256, 128, bias=False, single_grouped_weight=True)
    values = torch.randn(256, 128, requires_grad=True)
    with torch.no_grad():
        module.weight[0].view(2, 64, 256).copy_(torch.full((64, 2, 256), 3.0).transpose(0, 1))
    module.weight.members[1].quantize_(values.t())
    initial = module.weight.storage.initial
    assert (initial[0] == 3).all() and torch.equal(initial[1], values.detach().t()) and not initial.requires_grad
    copy.deepcopy(module)


def test_copies_of_a_group_keep_what_they_were_made_of() -> None:
    with te.quantized_model_init(recipe=FP8, preserve_high_precision_init_val=True):
        weight = te.GroupedLinear(4, 256, 128, bias=False, single_grouped_weight=True).weight
    before, copied = weight.storage.initial.clone(), weight.detach().clone()
    with torch.no_grad():
        for member in weight:
            member.copy_(VALUES)
    assert torch.equal(copied.storage.initial, before) and (weight.storage.initial == 2).all()


def test_a_part_of_a_member_is_not_written_in_silence() -> None:
    with te.quantized_model_init(recipe=FP8):
        weight = te.GroupedLinear(4, 256, 128, bias=False, single_grouped_weight=True).weight.detach()
    for context in (torch.no_grad, torch.inference_mode):
        with context(), pytest.raises(NotImplementedError, match="cannot write into a part"):
            [member[:64] for member in weight.members][0].zero_()  # noqa: RUF015  (the views are gone by then)


def test_ranks_agree_on_scales_of_a_member_that_was_written() -> None:
    whole = grouped.quantize(torch.randn(4, 128, 256), FORMATS["float8_tensorwise"])
    part = whole.split(64, 1)[1].clone()
    part[1].copy_(torch.full((64, 256), 2.0))
    unsettled = part.storage.unsettled
    assert unsettled is not None and (unsettled[1] == 2).all() and torch.equal(unsettled[0], part.dequantize()[0])


@pytest.mark.parametrize("wrapped", (False, True))
def test_members_that_are_loaded_behind_a_master_leave_it_what_it_is(wrapped: bool) -> None:
    """Values that are copied decide nothing, see [Note: Masters that are loaded]; an op in place then does."""
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=FP8):
        module = te.GroupedLinear(4, 256, 128, bias=False, single_grouped_weight=True)
    weight, params = module.weight, list(module.parameters())
    make = (lambda p: optim.MasterWeights(p, lambda q: torch.optim.AdamW(q, lr=1e-3))) if wrapped else optim.FusedAdam
    optimizer = make(params)
    weight.grad = torch.randn(weight.shape)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    master = optimizer.state[weight]["master_param"].clone()
    optimizer.load_state_dict(state)
    with torch.no_grad():
        for index, values in enumerate(weight.dequantize().clone()):
            weight[index].copy_(values)
    assert_bitwise(optimizer.state_dict()["state"][0]["master_param"], master, "master")
    with torch.no_grad():
        weight[2].mul_(0.5)
    master[2] *= 0.5
    assert_bitwise(optimizer.state_dict()["state"][0]["master_param"], master, "changed master")
