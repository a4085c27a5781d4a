"""State dicts of one parameter for all groups in a GroupedLinear that has one for each, and the other way round."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import te_dist as te
from te_dist.testing import assert_bitwise
from tests.nn.test_grouped_options import GROUPS, IN, OUT, make, step
from tests.nn.test_grouped_state import QUANTIZED


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_checkpoints_of_one_parameter_load_into_one_for_each_and_back(packed: bool, quantized: bool) -> None:
    made_by = QUANTIZED["mxfp8"] if quantized else None
    source = make(made_by, single_grouped_weight=packed, single_grouped_bias=packed)
    with te.quantized_model_init(enabled=quantized, recipe=made_by):
        kind = dict(single_grouped_weight=not packed, single_grouped_bias=not packed)
        target = nn.Sequential(te.GroupedLinear(GROUPS, IN, OUT, **kind))
    state = {f"0.{key}": value for key, value in source.state_dict().items()}
    target.load_state_dict(state)
    assert any(key.endswith("weight0") for key in state) != packed  # the caller's is left alone
    want = step(source, made_by)
    for key, value in step(target[0], made_by).items():
        assert_bitwise(value, want[key], key)


@pytest.mark.parametrize("packed", [False, True])
def test_values_at_initialization_are_loaded_into_the_other_kind(packed: bool) -> None:
    made_by, modules = QUANTIZED["block"], []
    for single, seed in ((packed, 0), (not packed, 1)):
        torch.manual_seed(seed)
        with te.quantized_model_init(recipe=made_by, preserve_high_precision_init_val=True):
            modules.append(te.GroupedLinear(GROUPS, IN, OUT, bias=False, single_grouped_weight=single))
    modules[1].load_state_dict(modules[0].state_dict())
    source, target = ([p.get_high_precision_init_val() for p in module.parameters()] for module in modules)
    assert_bitwise(torch.cat(target).view(-1), torch.cat(source).view(-1), "values at initialization")


@pytest.mark.parametrize("packed", [False, True])
def test_one_group_alone_is_loaded_into_the_other_kind(packed: bool) -> None:
    source, target = (te.GroupedLinear(1, IN, OUT, single_grouped_weight=single) for single in (packed, not packed))
    target.load_state_dict(source.state_dict())
    (weight,), (want,) = ([p for n, p in m.named_parameters() if "weight" in n] for m in (target, source))
    assert_bitwise(weight.detach().view(OUT, IN), want.detach().view(OUT, IN), "weight")


def test_values_that_are_none_of_a_group_are_told_of() -> None:
    module = make(None, single_grouped_weight=True)
    for wrong in ([1, 2], torch.tensor(1.0)):
        state = {f"weight{index}": wrong for index in range(GROUPS)}
        with pytest.raises(RuntimeError, match="weight"):
            module.load_state_dict(state)
        with pytest.raises(RuntimeError, match="weight"):
            make(None).load_state_dict({"weight": wrong})
    with pytest.raises(RuntimeError, match=rf"weight: got shape \(2, {OUT}, {IN}\), wanted {GROUPS} groups in front"):
        make(None).load_state_dict({"weight": torch.ones(2, OUT, IN)}, strict=False)
    state = {f"weight{index}": torch.ones(OUT + index, IN) for index in range(GROUPS)}
    with pytest.raises(RuntimeError, match="weight0 to weight2: got shapes .* wanted one for all"):
        module.load_state_dict(state, strict=False)


def test_a_checkpoint_that_lacks_a_group_is_refused() -> None:
    state = make(None).state_dict()
    del state["weight1"]
    with pytest.raises(RuntimeError, match='Missing key.*"weight"'):
        make(None, single_grouped_weight=True).load_state_dict(state)
