"""States that TransformerEngine saved: values, and beside them what its modules pickled."""

from __future__ import annotations

import warnings
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import nn

import te_dist as te
from te_dist import recipe
from te_dist.checkpoints import foreign
from te_dist.testing import assert_bitwise

MAKERS = {
    "Linear": lambda: te.Linear(64, 96),
    "LayerNormLinear": lambda: te.LayerNormLinear(64, 96),
    "LayerNormMLP": lambda: te.LayerNormMLP(64, 96, activation="swiglu"),
    "GroupedLinear": lambda: te.GroupedLinear(2, 64, 96),
    "LayerNorm": lambda: te.LayerNorm(64),
    "RMSNorm": lambda: te.RMSNorm(64),
}
NO_PICKLE = b"what would raise if it were unpickled"
EMPTY = {"None": None, "tensor": torch.empty(0, dtype=torch.uint8), "bytes": b"", "BytesIO": BytesIO()}
FULL = {
    "tensor": torch.frombuffer(bytearray(NO_PICKLE), dtype=torch.uint8),
    "bytes": NO_PICKLE,
    "BytesIO": BytesIO(NO_PICKLE),
    "another": {"scale_fwd": torch.ones(3)},
}
every_module = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


@pytest.fixture(autouse=True)
def _first_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "_has_warned", False)


def state_of(model: nn.Module, extra: object) -> dict[str, Any]:
    names = [name for name, module in model.named_modules() if type(module).__module__.startswith("te_dist.nn.")]
    names = [name for name in names if not isinstance(model.get_submodule(name), te.nn.LinearSite)]
    return {**model.state_dict(), **{f"{name}._extra_state".lstrip("."): extra for name in names}}


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("extra", EMPTY.values(), ids=EMPTY.keys())
@every_module
def test_states_load_as_they_are(make, extra: object, is_inside: bool) -> None:
    source, target = (nn.Sequential(make()) if is_inside else make() for _ in range(2))
    state = state_of(source, extra)
    assert len(state) == len(source.state_dict()) + 1
    given = dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = target.load_state_dict(state)
    assert not found.unexpected_keys
    assert state.keys() == given.keys() and all(state[key] is given[key] for key in given)
    for name, value in source.state_dict().items():
        assert_bitwise(target.state_dict()[name], value, name)


@pytest.mark.parametrize("extra", FULL.values(), ids=FULL.keys())
@every_module
def test_what_was_pickled_is_told_of_once_and_not_read(make, extra: object) -> None:
    with te.quantized_model_init(recipe=recipe.DelayedScaling()):
        target = nn.Sequential(make(), make())
    before = {name: value.clone() for name, value in target.state_dict().items() if ".scaling." in name}
    assert before or isinstance(target[0], te.LayerNorm | te.RMSNorm)  # which have no histories
    state = state_of(nn.Sequential(make(), make()), extra)
    with pytest.warns(UserWarning, match="TransformerEngine pickled .* start anew") as told:
        found = target.load_state_dict(state, strict=False)
        target.load_state_dict(state, strict=False)
    assert len(told) == 1
    assert not found.unexpected_keys
    for name, value in before.items():
        assert_bitwise(target.state_dict()[name], value, name)


@pytest.mark.parametrize("assign", [False, True])
def test_states_are_quantized(assign: bool) -> None:
    made_by = recipe.Float8BlockScaling()
    source = te.LayerNormLinear(128, 128)
    with te.quantized_model_init(recipe=made_by):
        target = te.LayerNormLinear(128, 128)
    target.load_state_dict(state_of(source, None), assign=assign)
    x = torch.ones(4, 128)
    with te.autocast(recipe=made_by):
        assert_bitwise(target(x), source(x), "of quantized weights")


def test_what_else_is_unexpected_stays_so() -> None:
    model = nn.Sequential(te.Linear(64, 96), nn.Linear(96, 64))
    others = ["0.other", "0._extra_state.scale", "1._extra_state", "2._extra_state"]
    found = model.load_state_dict({**state_of(model, None), **dict.fromkeys(others)}, strict=False)
    assert sorted(found.unexpected_keys) == sorted(others)


def test_classes_that_take_an_extra_state_are_given_it() -> None:
    class Counting(te.Linear):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: int) -> None:
            self.count = state

    model = Counting(64, 96)
    model.load_state_dict(model.state_dict())
    assert model.count == 3
    state = model.state_dict()
    del state["_extra_state"]
    assert model.load_state_dict(state, strict=False).missing_keys == ["_extra_state"]
