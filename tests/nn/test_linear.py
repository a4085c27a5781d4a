"""Linear over every recipe: what it computes, what it saves, what it leaves alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import te_dist as te
from te_dist import recipe
from te_dist.codecs import Tensorwise, gemm
from te_dist.formats import Direction, Region
from te_dist.fsdp2 import QuantizedParameter
from te_dist.recipe import Recipe
from te_dist.tensor import QuantizedTensor
from te_dist.testing import assert_bitwise
from tests.nn.recipes import CASES, COLUMNWISE, ROWWISE, exact_products, quantizer, relative_error

IN, OUT = 96, 160
every_recipe = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def make(made_by: Recipe | None, *, seed: int = 0, **options: Any) -> te.Linear:
    """A Linear of the same values for the same seed; its weight quantized if there is a recipe."""
    torch.manual_seed(seed)
    with te.quantized_model_init(enabled=made_by is not None, recipe=made_by):
        return te.Linear(IN, OUT, **options)


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step(module: te.Linear, made_by: Recipe, x: Tensor, grad: Tensor | None = None) -> tuple[Tensor, ...]:
    """(output, gradient of the input, of the weight, of the bias) of one pass by the recipe."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    with te.autocast(recipe=made_by):
        out = module(x)
    out.backward(normal(*out.shape, seed=2, dtype=out.dtype) if grad is None else grad)
    return out.detach(), x.grad, module.weight.grad, module.bias.grad


@pytest.mark.every_run(rows=(1, 16, 200))
@pytest.mark.parametrize("rows", [1, 16, 37, 128, 200])
@every_recipe
def test_products_are_those_of_the_quantized_operands(case: Any, rows: int) -> None:
    module, x, grad = make(None, params_dtype=torch.float32), normal(rows, IN), normal(rows, OUT, seed=2)
    out, grad_x, grad_w, grad_b = step(module, case.recipe, x, grad)
    want_out, want_x, want_w = exact_products(case.recipe, x, module.weight.detach(), grad)
    assert relative_error(out, want_out + module.bias.double()) < 1e-6
    assert relative_error(grad_x, want_x) < 1e-6
    assert relative_error(grad_w, want_w) < 1e-6
    assert relative_error(grad_b, grad.double().sum(0)) < 1e-6


@every_recipe
def test_products_are_close_to_exact_ones(case: Any) -> None:
    module, x = make(None, params_dtype=torch.bfloat16), normal(200, IN, dtype=torch.bfloat16)
    got = step(module, case.recipe, x)
    exact, x64 = copy.deepcopy(module).double(), x.double().requires_grad_()
    exact.zero_grad()
    out = F.linear(x64, exact.weight, exact.bias)
    out.backward(normal(200, OUT, seed=2, dtype=torch.bfloat16).double())
    for name, a, b in zip(
        ("y", "dx", "dw", "db"), got, (out, x64.grad, exact.weight.grad, exact.bias.grad), strict=True
    ):
        assert relative_error(a, b) < case.error, name
        assert F.cosine_similarity(a.double().flatten(), b.detach().flatten(), dim=0) > 1 - case.error**2, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_recipe
def test_quantized_and_plain_weights_give_the_same_bits(case: Any, dtype: torch.dtype) -> None:
    if case is CASES["high_precision_backward"]:
        pytest.skip("its weights cannot be parameters")
    x = normal(3, 7, IN, dtype=dtype)
    plain = step(make(None, params_dtype=dtype), case.recipe, x)
    quantized = make(case.recipe, params_dtype=dtype)
    assert isinstance(quantized.weight, QuantizedParameter)
    for name, a, b in zip(("y", "dx", "dw", "db"), step(quantized, case.recipe, x), plain, strict=True):
        assert_bitwise(a, b, name)


@pytest.mark.parametrize("features", ((-1, 4), (4, -1)))
def test_negative_features_are_named(features: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"0 or more, got {features[0]} and {features[1]}"):
        te.Linear(*features)


def test_a_weight_on_meta_is_named() -> None:
    with torch.device("meta"):
        module = make(None)
    with pytest.raises(ValueError, match=r"on the meta device .* call te_dist.fsdp2.materialize"):
        module(normal(3, IN))


@pytest.mark.every_run(shape=((IN,), (2, 3, 5, IN), (3, 0, IN)))
@pytest.mark.parametrize("shape", [(IN,), (1, IN), (2, 3, 5, IN), (0, IN), (3, 0, IN)])
@every_recipe
def test_any_leading_dimensions(case: Any, shape: tuple[int, ...]) -> None:
    module, x = make(None), normal(*shape)
    out, grad_x, grad_w, grad_b = step(module, case.recipe, x)
    assert out.shape == (*shape[:-1], OUT)
    assert grad_x.shape == shape
    assert grad_w.shape == (OUT, IN)
    flat = step(make(None), case.recipe, x.reshape(-1, IN), normal(*out.shape, seed=2).reshape(-1, OUT))
    for got, want in zip((out.reshape(-1, OUT), grad_x.reshape(-1, IN), grad_w, grad_b), flat, strict=True):
        assert_bitwise(got, want, "flattened")


@pytest.mark.parametrize("quantized", [False, True])
@every_recipe
def test_backward_saves_the_columnwise_input_and_the_weight_itself(case: Any, quantized: bool) -> None:
    if quantized and case is CASES["high_precision_backward"]:
        pytest.skip("its weights cannot be parameters")
    module, x = make(case.recipe if quantized else None), normal(40, IN).requires_grad_()
    saved = saved_by(lambda: module(x), case.recipe)
    found = quantizer(case.recipe, "input")
    region = Region.whole(saved_rows(40, case.recipe), IN)
    inputs, weight = saved
    if hasattr(found, "fp8"):
        want = region.shape[0] * IN + 4
    else:
        want = found.declare(x.dtype).select(COLUMNWISE).allocated_bytes(region)
    assert isinstance(inputs, QuantizedTensor)
    assert sum(b.untyped_storage().nbytes() for b in inputs.storage.buffers.values()) == want
    if quantized:
        assert weight.storage is module.weight.storage
    else:
        assert weight.data_ptr() == module.weight.data_ptr()


def saved_rows(rows: int, made_by: Recipe) -> int:
    """Tiles of 128 where 16 rows belong together: transformed, or one choice of 4 over 6 columnwise."""
    if not isinstance(made_by, recipe.NVFP4BlockScaling) or (made_by.disable_rht and made_by.nvfp4_4over6 != "all"):
        return rows
    tile = 16 if made_by.row_scaled_activation else 128  # no groups have an amax for each row
    return -(-rows // tile) * tile


def saved_by(function: Any, made_by: Recipe) -> list[Any]:
    """What `function` saves for backward under the recipe."""
    saved: list[Any] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        te.autocast(recipe=made_by),
    ):
        function()
    return saved


@every_recipe
def test_what_is_frozen_costs_nothing(case: Any) -> None:
    module, x, grad = make(None), normal(40, IN), normal(40, OUT, seed=2)
    _, want, _, _ = step(make(None), case.recipe, x)
    module.weight.requires_grad_(False)
    asking = x.clone().requires_grad_()
    with te.autocast(recipe=case.recipe):
        module(asking).backward(grad)
    assert module.weight.grad is None
    assert_bitwise(asking.grad, want, "dgrad alone")
    (weight,) = saved_by(lambda: module(asking), case.recipe)
    assert weight.data_ptr() == module.weight.data_ptr()
    module.weight.requires_grad_(True)
    (inputs,) = saved_by(lambda: module(x), case.recipe)
    assert isinstance(inputs, QuantizedTensor)
    module.weight.requires_grad_(False)
    assert saved_by(lambda: module(x), case.recipe) == []


def stateful(made_by: Recipe) -> bool:
    """Whether earlier passes change later ones."""
    return any(hasattr(quantizer(made_by, kind), "fp8") for kind in ("input", "grad_output"))


@every_recipe
def test_without_bias_and_with_the_bias_returned(case: Any) -> None:
    x = normal(40, IN)
    with_bias = make(None)
    bare = make(None, bias=False)
    bare.weight.data.copy_(with_bias.weight)
    split = make(None, return_bias=True)
    with te.autocast(recipe=case.recipe):
        out, bias = split(x)
        assert bias is split.bias
        assert_bitwise(out, bare(x), "without bias")
        assert_bitwise(with_bias(x), out + bias, "bias")
    assert bare.bias is None


@every_recipe
def test_a_quantized_input_gives_the_same_bits(case: Any) -> None:
    if stateful(case.recipe):
        pytest.skip("the scale of a stateful recipe is the module's")
    module, x = make(None, params_dtype=torch.bfloat16), normal(4, 16, IN, dtype=torch.bfloat16)
    want = step(module, case.recipe, x)
    asking = x.clone().requires_grad_()
    module.zero_grad()
    with te.autocast(recipe=case.recipe):
        out = module(quantizer(case.recipe, "input").quantize(asking))
    out.backward(normal(*out.shape, seed=2, dtype=torch.bfloat16))
    got = (out, asking.grad, module.weight.grad, module.bias.grad)
    for name, a, b in zip(("y", "dx", "dw", "db"), got, want, strict=True):
        assert_bitwise(a, b, name)


def test_a_quantized_input_without_columns_can_not_train_the_weight() -> None:
    module, x = make(None), te.MXFP8Quantizer(columnwise=False)(normal(32, IN))
    with te.autocast(recipe=recipe.MXFP8BlockScaling()), pytest.raises(ValueError, match="columnwise=True"):
        module(x)
    module.weight.requires_grad_(False)
    with te.autocast(recipe=recipe.MXFP8BlockScaling()):
        assert module(x).shape == (32, OUT)


@every_recipe
def test_evaluation_between_steps_changes_nothing(case: Any) -> None:
    def two_steps(between: bool) -> list[tuple[Tensor, ...]]:
        module = make(None if case is CASES["high_precision_backward"] else case.recipe)
        first = step(module, case.recipe, normal(40, IN))
        if between:
            buffers = {n: b.clone() for n, b in module.state_dict().items()}
            with torch.no_grad(), te.autocast(recipe=case.recipe):
                module.eval()(normal(8, IN, seed=9) * 100)
            module.train()
            for name, buffer in module.state_dict().items():
                assert_bitwise(buffer, buffers[name], name)
        return [first, step(module, case.recipe, normal(40, IN, seed=5))]

    for got, want in zip(two_steps(True), two_steps(False), strict=True):
        for a, b in zip(got, want, strict=True):
            assert_bitwise(a, b, "step")


def test_passes_that_take_turns_are_planned_once() -> None:
    module, x = make(None), normal(8, IN)
    plans = []
    for made_by in (recipe.MXFP8BlockScaling(), recipe.Float8BlockScaling()) * 2:
        with te.autocast(recipe=made_by):
            module(x)
            plans.append(module.gemm.plan(x, module.weight))
        module(x)  # an evaluation in high precision
    assert plans[2] is plans[0] and plans[3] is plans[1]


@every_recipe
def test_gradients_have_the_dtype_of_what_they_belong_to(case: Any) -> None:
    module = make(None, params_dtype=torch.float32)
    out, grad_x, grad_w, grad_b = step(module, case.recipe, normal(40, IN, dtype=torch.bfloat16))
    assert out.dtype == grad_x.dtype == torch.bfloat16
    assert grad_w.dtype == grad_b.dtype == torch.float32


@every_recipe
def test_torch_autocast_sets_the_dtype_of_activations(case: Any) -> None:
    module, x = make(None), normal(32, IN)
    with te.autocast(recipe=case.recipe):
        want = module(x.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            got = module(x)
    assert_bitwise(got, want, "under torch.autocast")


@every_recipe
def test_recomputed_passes_give_the_same_gradients(case: Any) -> None:
    if case is CASES["high_precision_backward"]:
        pytest.skip("its weights cannot be parameters")
    results = []
    for run in (lambda f, x: f(x), te.checkpoint):
        module, x = make(case.recipe), normal(40, IN).requires_grad_()
        for _ in range(2):
            module.zero_grad()
            with te.autocast(recipe=case.recipe):
                out = run(lambda t, module=module: module(module(t)[:, :IN]), x)
            out.backward(normal(40, OUT, seed=2))
        results.append((out, x.grad, module.weight.grad, *module.buffers()))
    for got, want in zip(*results, strict=True):
        assert_bitwise(got, want, "recomputed")


def test_outside_of_autocast_a_plain_weight_is_plain() -> None:
    module, x = make(None), normal(5, IN)
    assert_bitwise(module(x), F.linear(x, module.weight, module.bias), "plain")
    half = module(x.bfloat16())
    assert_bitwise(half, F.linear(x.bfloat16(), module.weight.bfloat16(), module.bias.bfloat16()), "bf16 input")
    with te.autocast(recipe=recipe.MXFP8BlockScaling()), te.autocast(enabled=False):
        assert_bitwise(module(x), F.linear(x, module.weight, module.bias), "disabled inside")


@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4", "hybrid"])
def test_outside_of_autocast_a_quantized_weight_stands_for_its_values(name: str) -> None:
    module, x = make(CASES[name].recipe), normal(5, IN).requires_grad_()
    storage, grad = module.weight.storage, normal(5, OUT, seed=2)
    out = module(x)
    out.backward(grad)
    assert relative_error(out, F.linear(x, module.weight.dequantize(), module.bias)) < 1e-6
    assert relative_error(x.grad, grad @ storage.operand(Direction.COLUMNWISE, torch.float32)) < 1e-6
    assert relative_error(module.weight.grad, grad.t() @ x) < 1e-6


@pytest.mark.parametrize("quantized", [False, True])
def test_a_weight_that_changes_before_backward_is_noticed(quantized: bool) -> None:
    made_by = recipe.Float8BlockScaling()
    module = make(made_by if quantized else None)
    with te.autocast(recipe=made_by):
        out = module(normal(5, IN).requires_grad_())
    with torch.no_grad():
        module.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_an_input_that_changes_before_backward_does_not_matter() -> None:
    module, x = make(None), normal(40, IN)
    _, _, want, _ = step(module, recipe.Float8BlockScaling(), x)
    module.zero_grad()
    with te.autocast(recipe=recipe.Float8BlockScaling()):
        out = module(x)
    x.zero_()
    out.backward(normal(40, OUT, seed=2))
    assert_bitwise(module.weight.grad, want, "wgrad of what was quantized")


@pytest.mark.parametrize("shape", [(40, 2 * IN), (2 * IN, 40)])
def test_strided_inputs(shape: tuple[int, int]) -> None:
    module, wide = make(None), normal(*shape)
    x = wide[:, ::2] if shape[0] == 40 else wide.t()[:, ::2]
    with te.autocast(recipe=recipe.Float8BlockScaling()):
        assert_bitwise(module(x), module(x.contiguous()), "strided")
        with torch.inference_mode():
            assert_bitwise(module(x[:1].expand(4, 3, IN)), module(x[:1].repeat(12, 1)).view(4, 3, OUT), "expanded")


def test_gradients_accumulate() -> None:
    module, x = make(recipe.Float8BlockScaling()), normal(40, IN)
    _, _, once, _ = step(module, recipe.Float8BlockScaling(), x)
    once = once.clone()
    with te.autocast(recipe=recipe.Float8BlockScaling()):
        module(x).backward(normal(40, OUT, seed=2))
    assert_bitwise(module.weight.grad, 2 * once, "two passes")


@pytest.mark.parametrize("quantized", [False, True])
@every_recipe
def test_main_gradients_are_added_to_by_the_product(case: Any, quantized: bool) -> None:
    if quantized and case is CASES["high_precision_backward"]:
        pytest.skip("its weights cannot be parameters")
    made_by = case.recipe if quantized else None
    module, twin = make(made_by, fuse_wgrad_accumulation=True), make(made_by)
    there = normal(OUT, IN, seed=8)
    module.weight.main_grad = there.clone()
    for seed in (1, 5):
        x = normal(40, IN, seed=seed)
        want = step(twin, case.recipe, x)
        got = step_of_main_grad(module, case.recipe, x)
        for name, a, b in zip(("y", "dx", "db"), got, (want[0], want[1], want[3]), strict=True):
            assert_bitwise(a, b, name)
        there += want[2]
        assert module.weight.grad is None
        assert_bitwise(module.weight.main_grad, there, f"main gradient after pass {seed}")


def step_of_main_grad(module: te.Linear, made_by: Recipe, x: Tensor) -> tuple[Tensor, ...]:
    """(output, gradient of the input, of the bias)."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    with te.autocast(recipe=made_by):
        out = module(x)
    out.backward(normal(*out.shape, seed=2, dtype=out.dtype))
    return out.detach(), x.grad, module.bias.grad


@pytest.mark.parametrize("main_grad", [None, torch.zeros(OUT, IN, dtype=torch.bfloat16), torch.zeros(IN, OUT).t()])
def test_main_gradients_that_do_not_fit_are_refused(main_grad: Tensor | None) -> None:
    module = make(None, fuse_wgrad_accumulation=True)
    if main_grad is not None:
        module.weight.main_grad = main_grad
    with te.autocast(recipe=recipe.Float8BlockScaling()):
        out = module(normal(16, IN))
    with pytest.raises(RuntimeError, match="main_grad.* (got None|wanted fp32 of shape)"):
        out.sum().backward()


def test_tied_weights_collect_both_gradients() -> None:
    torch.manual_seed(0)
    made_by = recipe.Float8BlockScaling()
    with te.quantized_model_init(recipe=made_by):
        first, second = te.Linear(IN, IN, bias=False), te.Linear(IN, IN, bias=False)
    second.weight = first.weight
    with te.autocast(recipe=made_by):
        second(first(normal(8, IN))).sum().backward()
    twins = copy.deepcopy(first), copy.deepcopy(first)
    for twin in twins:
        twin.zero_grad()
    with te.autocast(recipe=made_by):
        twins[1](twins[0](normal(8, IN))).sum().backward()
    assert_bitwise(first.weight.grad, twins[1].weight.grad + twins[0].weight.grad, "tied")


@pytest.mark.parametrize("made_by", [None, recipe.Float8BlockScaling()])
def test_inputs_of_another_width_are_refused_by_name(made_by: Recipe | None) -> None:
    module = make(made_by, name="blocks.3.up")
    with te.autocast(recipe=recipe.Float8BlockScaling()), pytest.raises(ValueError, match="blocks.3.up: .* 95 columns"):
        module(normal(4, IN - 1))
    for kind in (te.LayerNormLinear, te.LayerNormMLP):
        with pytest.raises(ValueError, match=f"blocks.4: .* {IN - 1} columns, its norm takes {IN}"):
            kind(IN, OUT, name="blocks.4")(normal(4, IN - 1))


def test_a_hybrid_that_requantizes_rows_cannot_be_a_parameter() -> None:
    with pytest.raises(ValueError, match="quantized_model_init"):
        make(CASES["high_precision_backward"].recipe)


def test_columns_of_a_hybrid_come_from_either_source() -> None:
    x = normal(32, IN)
    for source in ("original", "rowwise_dequantized"):
        hybrid = te.HybridQuantizer(
            rowwise_quantizer=te.NVFP4Quantizer(), columnwise_quantizer=te.MXFP8Quantizer(), columnwise_source=source
        )
        seen = x if source == "original" else te.NVFP4Quantizer().encode(x, ROWWISE).dequantize()
        want = te.MXFP8Quantizer().encode(seen, COLUMNWISE).dequantize()
        for directions in ((ROWWISE, COLUMNWISE), (COLUMNWISE,)):
            got = hybrid.encode(x, *directions).dequantize(direction=COLUMNWISE)
            assert_bitwise(got, want, f"columns from {source}")


def test_stochastic_rounding_follows_the_generator() -> None:
    module, x = make(None), normal(64, IN)
    torch.manual_seed(3)
    first = step(module, recipe.NVFP4BlockScaling(), x)
    torch.manual_seed(3)
    again = step(module, recipe.NVFP4BlockScaling(), x)
    torch.manual_seed(4)
    other = step(module, recipe.NVFP4BlockScaling(), x)
    assert_bitwise(again[2], first[2], "the same seed")
    assert not torch.equal(other[2], first[2])
    assert_bitwise(other[0], first[0], "forward does not round by chance")


def test_features_that_do_not_fit_are_refused_when_the_module_is_made() -> None:
    with te.quantized_model_init(recipe=recipe.NVFP4BlockScaling()):
        with pytest.raises(ValueError, match=r"blocks\.0\.query: in_features=63 .* multiples of 2"):
            te.Linear(63, 64, name="blocks.0.query")
        with pytest.raises(ValueError, match="out_features=63"):
            te.Linear(64, 63)
    plain = te.Linear(63, 64)
    with te.autocast(recipe=recipe.NVFP4BlockScaling()), pytest.raises(ValueError, match="in_features=63"):
        plain(normal(4, 63))


def test_features_that_do_not_fit_the_products_of_a_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = (Tensorwise, Tensorwise, "cpu")
    monkeypatch.setitem(gemm._TABLE, pair, gemm.Entry(gemm._TABLE[pair].gemm, 16))
    made_by = recipe.Float8CurrentScaling(amax_epsilon=2.0**-20)
    with te.autocast(recipe=made_by):
        with pytest.raises(ValueError, match="head: out_features=40 does not fit .* multiples of 16 on cpu"):
            te.Linear(64, 40, name="head")(normal(3, 64))
        module = te.Linear(64, 48, name="body")
        out = module(normal(3, 64))
    out.sum().backward()
    assert out.shape == (3, 48)


def test_transforms_that_do_not_match_are_refused_when_the_module_is_made() -> None:
    def factory(role: recipe.QuantizerRole) -> te.NVFP4Quantizer:
        return te.NVFP4Quantizer(with_rht=role.tensor_type == "input")

    with te.quantized_model_init(recipe=recipe.CustomRecipe(factory)), pytest.raises(ValueError, match="alike"):
        te.Linear(64, 64)


@pytest.mark.parametrize("name", ["tp_size", "ub_overlap_ag", "delay_wgrad_compute"])
def test_keywords_of_transformer_engine_that_are_not_here_say_where_to_go(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=.* is not supported: .{{20}}"):
        te.Linear(4, 4, **{name: 2 if name == "tp_size" else True})
    assert te.Linear(4, 4, **{name: 1 if name == "tp_size" else False}).weight.shape == (4, 4)


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="no keyword 'biass'"):
        te.Linear(4, 4, biass=True)
