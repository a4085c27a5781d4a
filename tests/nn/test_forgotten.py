"""Training that forgot its `autocast` is told so."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch

import te_dist as te
from te_dist.nn import forgotten


@pytest.mark.parametrize("grouped", [False, True])
def test_training_quantized_weights_outside_of_autocast_warns_once(monkeypatch, grouped: bool) -> None:
    monkeypatch.setattr(forgotten, "_has_warned", False)
    with te.quantized_model_init(recipe=te.recipe.Float8BlockScaling()):
        layer = te.GroupedLinear(1, 128, 128, bias=False) if grouped else te.Linear(128, 128, bias=False)
    x = torch.randn(16, 128)
    run = functools.partial(layer, x, [16]) if grouped else functools.partial(layer, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with te.autocast(enabled=False):
            run()
        with torch.no_grad():
            run()
        layer.requires_grad_(False)
        run()
        layer.requires_grad_(True)
        with pytest.raises(UserWarning, match="trained outside of te_dist.autocast.*enabled=False"):
            run()
        run()
