"""Recipes answer by role with formats; contexts nest."""

from __future__ import annotations

import pickle

import pytest
import torch

import te_dist as te
from te_dist import recipe
from te_dist.catalog import FORMATS
from te_dist.context import current_autocast, current_model_init
from te_dist.recipe import QuantizerRole, Recipe
from te_dist.scaling.history import DelayedScalingRequest
from tests.nn.recipes import CASES, mxfp8_forward_nvfp4_backward

STATELESS = [
    (recipe.Float8CurrentScaling(), ("float8_tensorwise_tn", "float8_tensorwise_tn")),
    (recipe.Float8BlockScaling(), ("float8_block_1d", "float8_block_2d", "float8_block_1d")),
    (recipe.MXFP8BlockScaling(), ("mxfp8_1d", "mxfp8_1d", "mxfp8_1d")),
    (recipe.MXFP8BlockScaling(enable_2d_quantization=True), ("mxfp8_1d", "mxfp8_2d", "mxfp8_1d")),
    (recipe.NVFP4BlockScaling(), ("nvfp4_1d_hadamard", "nvfp4_2d")),
]


@pytest.mark.parametrize(("made_by", "names"), STATELESS, ids=lambda v: type(v).__name__)
def test_every_role_has_its_format(made_by: Recipe, names: tuple[str, ...]) -> None:
    for kind, name in zip(("input", "weight", "grad_output"), names, strict=False):
        assert made_by.quantizer(QuantizerRole("linear", kind)).format() == FORMATS[name], kind


def test_gradients_have_range_by_default_and_inputs_precision() -> None:
    for made_by in (recipe.Float8CurrentScaling(), recipe.MXFP8BlockScaling(recipe.Format.HYBRID)):
        types = [
            made_by.quantizer(QuantizerRole("linear", kind)).format().rowwise.codec.fp8
            for kind in ("input", "weight", "grad_output")
        ]
        assert types == ["e4m3", "e4m3", "e5m2"]


def test_nvfp4_gradients_are_transformed_and_rounded_by_chance() -> None:
    grads = recipe.NVFP4BlockScaling().quantizer(QuantizerRole("linear", "grad_output")).format()
    assert grads.rowwise.codec.stochastic
    assert grads.columnwise.codec.stochastic
    assert grads.rowwise.codec.hadamard is None
    inputs = recipe.NVFP4BlockScaling().quantizer(QuantizerRole("linear", "input")).format()
    assert grads.columnwise.codec.hadamard == inputs.columnwise.codec.hadamard is not None


def test_delayed_scaling_keeps_no_history_of_weights() -> None:
    made_by = recipe.DelayedScaling(margin=1)
    assert made_by.quantizer(QuantizerRole("linear", "input")) == DelayedScalingRequest("e4m3", 1)
    assert made_by.quantizer(QuantizerRole("linear", "grad_output")) == DelayedScalingRequest("e5m2", 1)
    assert isinstance(made_by.quantizer(QuantizerRole("linear", "weight")), te.Float8CurrentScalingQuantizer)


def test_a_custom_recipe_is_asked_by_role_and_name() -> None:
    asked = []

    def factory(role: QuantizerRole) -> te.MXFP8Quantizer:
        asked.append((role.module_type, role.tensor_type, role.name))
        return te.MXFP8Quantizer()

    with te.quantized_model_init(recipe=recipe.CustomRecipe(factory)):
        te.Linear(64, 64, name="head")
        te.LayerNormMLP(64, 64, name="mlp")
    assert {name for _, _, name in asked} == {"head", "mlp.fc1", "mlp.fc2"}
    assert len(asked) == 9, "once for every tensor"


def test_a_factory_that_answers_nothing_is_named() -> None:
    with pytest.raises(ValueError, match="a quantizer or a DelayedScalingRequest is wanted"):
        recipe.CustomRecipe(lambda role: None).quantizer(QuantizerRole("linear", "input"))
    for given in (te.MXFP8Quantizer(), "mxfp8"):
        with pytest.raises(TypeError, match="qfactory: got .*, wanted a function from a QuantizerRole"):
            recipe.CustomRecipe(given)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_recipes_are_values(case) -> None:
    assert pickle.loads(pickle.dumps(case.recipe)) == case.recipe
    assert hash(case.recipe) == hash(pickle.loads(pickle.dumps(case.recipe)))
    with pytest.raises(AttributeError):
        case.recipe.margin = 3


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (recipe.Float8BlockScaling, {"w_block_scaling_dim": 3}),
        (recipe.NVFP4BlockScaling, {"nvfp4_4over6": "some"}),
        (recipe.NVFP4BlockScaling, {"nvfp4_4over6": "all"}),
        (recipe.DelayedScaling, {"amax_history_len": 0}),
    ],
)
def test_what_cannot_be_is_refused_when_the_recipe_is_made(kind, wrong) -> None:
    with pytest.raises(ValueError, match='1 or|is "none"|disable_rht'):
        kind(**wrong)


@pytest.mark.parametrize("kind", (recipe.DelayedScaling, recipe.Float8CurrentScaling, recipe.Float8BlockScaling))
def test_the_name_of_a_format_is_none(kind) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__}: fp8_format: got 'hybrid', wanted one of Format.E4M3"):
        kind(fp8_format="hybrid")


def test_contexts_nest_and_end() -> None:
    outer, inner = recipe.MXFP8BlockScaling(), recipe.NVFP4BlockScaling()
    assert current_autocast().recipe is None
    with te.autocast(recipe=outer):
        with te.autocast(recipe=inner):
            assert current_autocast().recipe == inner
            with te.autocast(enabled=False):
                assert current_autocast().recipe is None
        assert current_autocast().recipe == outer
    assert current_autocast().recipe is None
    with pytest.raises(RuntimeError, match="on purpose"), te.autocast(recipe=outer):
        raise RuntimeError("on purpose")
    assert current_autocast().recipe is None


def test_contexts_decorate_and_are_entered_again() -> None:
    scope = te.autocast(recipe=recipe.MXFP8BlockScaling())

    @scope
    def recipe_inside(depth: int) -> type:
        with scope:
            return recipe_inside(depth - 1) if depth else type(current_autocast().recipe)

    assert recipe_inside(2) is recipe.MXFP8BlockScaling
    assert current_autocast().recipe is None


def test_initialization_nests() -> None:
    with te.quantized_model_init(recipe=recipe.MXFP8BlockScaling()):
        quantized = te.Linear(32, 32)
        with te.quantized_model_init(enabled=False):
            plain = te.Linear(32, 32)
    assert current_model_init().recipe is None
    assert isinstance(quantized.weight, te.QuantizedTensor)
    assert type(plain.weight) is torch.nn.Parameter


@pytest.mark.parametrize("context", [te.autocast, te.quantized_model_init])
def test_an_enabled_context_needs_a_recipe(context) -> None:
    with pytest.raises(ValueError, match=f"{context.__name__} needs a recipe"):
        context()
    with pytest.raises(ValueError, match="by keyword"):
        context(recipe.Float8BlockScaling())
    with context(enabled=False, recipe=None):
        pass


def test_a_hybrid_has_a_format_of_both() -> None:
    inputs = mxfp8_forward_nvfp4_backward(QuantizerRole("linear", "input"))
    assert inputs.format() == FORMATS["hybrid_mxfp8_nvfp4"]
