"""What `help` and torch's utilities see of constructors is what these take."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle

import pytest
import torch
from torch import nn

import te_dist as te
from te_dist import recipe
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
LINEAR = (te.Linear, te.LayerNormLinear, te.LayerNormMLP)
every_linear = pytest.mark.parametrize("module", LINEAR, ids=lambda each: each.__name__)
RECIPES = (
    recipe.DelayedScaling,
    recipe.Float8CurrentScaling,
    recipe.Float8BlockScaling,
    recipe.MXFP8BlockScaling,
    recipe.NVFP4BlockScaling,
)
every_recipe = pytest.mark.parametrize("made", RECIPES, ids=lambda each: each.__name__)


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


# -- keywords of TransformerEngine elsewhere ------------------------------------------------------------------------


@every_linear
def test_forward_passes_say_where_to_go(module: type[nn.Module]) -> None:
    made, x = module(*MODULES[module]), torch.ones(4, 64)
    name = f"{module.__name__}.forward"
    for first in (True, False):
        with pytest.raises(ValueError, match=f"{name}: is_first_microbatch={first} .*quantized_model_init .*MoE take"):
            made(x, is_first_microbatch=first)
    for option in ("fp8_output", "fp8_grad"):
        with pytest.raises(ValueError, match=f"{name}: {option}=True is not supported: .*high precision"):
            made(x, **{option: True})
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'other'"):
        made(x, other=None)
    assert torch.equal(made(x, is_first_microbatch=None, fp8_output=False, fp8_grad=False), made(x))


@every_linear
def test_forward_passes_show_what_they_take(module: type[nn.Module]) -> None:
    assert list(inspect.signature(module(*MODULES[module]).forward).parameters) == ["inp"]
    assert list(inspect.signature(module.forward).parameters) == ["self", "inp"]


@every_linear
def test_forward_passes_are_traced_with_keywords_that_ask_for_nothing(module: type[nn.Module]) -> None:
    torch.compiler.reset()
    made, x = module(*MODULES[module]), torch.ones(4, 64)
    compiled = torch.compile(made, fullgraph=True, backend="eager")
    with te.autocast(recipe=recipe.Float8BlockScaling()):
        assert torch.equal(compiled(x, is_first_microbatch=None), made(x))
        assert torch.equal(compiled(x), made(x))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fp8_recipe": recipe.DelayedScaling()}, r"fp8_recipe=DelayedScaling\(.*\) .* its name is recipe here"),
        ({"fp8_group": "group"}, "fp8_group='group' .* its name is amax_reduction_group here"),
        ({"calibrating": True}, "calibrating=True .* leave it out"),
    ],
)
def test_autocast_says_where_to_go(given: dict, words: str) -> None:
    with pytest.raises(ValueError, match=f"autocast: {words}"):
        te.autocast(enabled=True, **given)


def test_autocast_takes_what_asks_for_nothing_and_shows_what_it_takes() -> None:
    with te.autocast(True, recipe=recipe.Float8BlockScaling(), fp8_recipe=None, fp8_group=None, calibrating=False):
        pass
    with pytest.raises(TypeError, match=r"autocast\(\) got an unexpected keyword argument 'other'"):
        te.autocast(other=1)
    assert list(inspect.signature(te.autocast).parameters) == ["enabled", "recipe", "amax_reduction_group"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"interval": 16}, "interval=16 .* once per backward pass"),
        ({"override_linear_precision": (False, False, True)}, "CustomRecipe"),
        ({"scaling_factor_compute_algo": max}, "one rule for scales"),
        ({"backward_override": "dequantized"}, "HybridQuantizer"),
        ({"fp8_dpa": True}, "attention is torch's"),
        ({"fp8_mha": True}, "attention is torch's"),
        ({"fp8_gemm_fprop": object()}, "gradients in fp32"),
    ],
)
@every_recipe
def test_recipes_say_where_to_go(made: type[recipe.Recipe], given: dict, words: str) -> None:
    with pytest.raises(ValueError, match=f"{made.__name__}: .*{words}"):
        made(**given)


@every_recipe
def test_recipes_take_what_asks_for_nothing_and_show_what_they_take(made: type[recipe.Recipe]) -> None:
    nothing = {"interval": 1, "margin": 0, "fp8_dpa": False, "fp8_mha": False, "scaling_factor_compute_algo": None}
    assert made(**nothing) == made()
    with pytest.raises(TypeError, match=f"{made.__name__}.* got an unexpected keyword argument 'other'"):
        made(other=1)
    assert list(inspect.signature(made).parameters) == [each.name for each in dataclasses.fields(made)]
    for same in (pickle.loads(pickle.dumps(made())), copy.deepcopy(made()), dataclasses.replace(made())):
        assert same == made() and hash(same) == hash(made())


def test_fields_are_no_keywords_of_others() -> None:
    assert recipe.DelayedScaling(margin=3).margin == 3
    with pytest.raises(ValueError, match="MXFP8BlockScaling: margin=3 is not supported"):
        recipe.MXFP8BlockScaling(margin=3)
    with pytest.raises(ValueError, match="NVFP4BlockScaling: fp8_format=.*HYBRID.* is not supported"):
        recipe.NVFP4BlockScaling(fp8_format=recipe.Format.HYBRID)
