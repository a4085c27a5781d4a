"""What `help` and torch's utilities see of constructors is what these take."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import te_dist as te
from te_dist.nn.moe.experts import GroupedMLP, SwiGluMLP

MODULES = {
    te.Linear: (64, 96),
    te.LayerNormLinear: (64, 96),
    te.LayerNormMLP: (64, 96),
    te.GroupedLinear: (4, 64, 96),
    te.nn.MoE: (64, 96, te.nn.Routing(4, 2)),
    GroupedMLP: (4, 64, 96),
    SwiGluMLP: (64, 96),
    te.LayerNorm: (64,),
    te.RMSNorm: (64,),
}
every_module = pytest.mark.parametrize("module", MODULES, ids=lambda each: each.__name__)


@every_module
def test_signatures_have_no_hidden_keywords(module: type[nn.Module]) -> None:
    parameters = inspect.signature(module).parameters.values()
    assert "device" in {each.name for each in parameters}
    assert not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    assert "Ellipsis" not in str(inspect.signature(module))


@every_module
def test_what_signatures_say_is_taken(module: type[nn.Module]) -> None:
    """Every keyword is known: another one raises TypeError, which names those that are."""
    with pytest.raises(TypeError, match="no_such_keyword") as error:
        module(*MODULES[module], no_such_keyword=1)
    for each in inspect.signature(module).parameters.values():
        if isinstance(each.default, type(te.nn.options._Unsaid())):
            assert repr(each.name) in str(error.value)


@every_module
def test_torch_makes_them_without_initialization(module: type[nn.Module]) -> None:
    made = nn.utils.skip_init(module, *MODULES[module])
    assert all(param.device == torch.device("cpu") for param in made.parameters())
    assert made.state_dict().keys() == module(*MODULES[module]).state_dict().keys()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"dtype": torch.bfloat16}, ValueError, "Linear: dtype=torch.bfloat16 is not supported: .*params_dtype"),
        ({"params_dtype": "bfloat16"}, TypeError, "params_dtype: got 'bfloat16', wanted a dtype"),
        ({"params_dtype": torch.int8}, ValueError, "params_dtype: got torch.int8, wanted a dtype"),
        ({"params_dtype": torch.float8_e4m3fn}, ValueError, "float8_e4m3fn, wanted .*quantized_model_init"),
    ],
)
def test_dtypes_without_gradients_are_refused(given: dict, error: type[Exception], words: str) -> None:
    for device in ("cpu", "meta"):
        with pytest.raises(error, match=words):
            te.Linear(16, 32, device=device, **given)
