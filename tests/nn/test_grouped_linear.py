"""GroupedLinear over recipes: each group as if it were alone in a Linear, whatever the sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import te_dist as te
from te_dist import recipe
from te_dist.kernels.runtime import recording
from te_dist.nn import group_table
from te_dist.recipe import Recipe
from te_dist.testing import assert_bitwise
from tests.nn.recipes import CASES, relative_error

IN, OUT, SPARE = 128, 256, 3
# What grouped products refuse: squares and rows' own amaxes as operands, and pairs of unlike encodings.
REFUSED = {"block_2d", "nvfp4_row_scaled", "delayed_inputs_only"}
COMPUTED: dict[str, Any] = {"plain": None} | {name: case.recipe for name, case in CASES.items() if name not in REFUSED}
NO_PARAMETER = {"plain", "high_precision_backward"}  # recipes whose weights are no parameters
SIZES = {
    "ragged": [5, 0, 130, 37],
    "one": [200],
    "one_has_all": [0, 0, 150, 0],
    "aligned": [128, 256],
    "none": [0, 0],
    "many": [3, 0, 17, 1] * 5,
}
every_recipe = pytest.mark.parametrize("made_by", COMPUTED.values(), ids=COMPUTED.keys())
Gradients = dict[str, Tensor]


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(num: int, quantized: Recipe | None = None, **options: Any) -> te.GroupedLinear:
    """A GroupedLinear of the same values every time; its weights quantized if there is a recipe."""
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=quantized is not None, recipe=quantized):
        return te.GroupedLinear(num, IN, OUT, **options)


def inside(made_by: Recipe | None) -> Any:
    """Of autocast by a recipe; of nothing without."""
    return nullcontext() if made_by is None else te.autocast(recipe=made_by)


def step(module: te.GroupedLinear, made_by: Recipe | None, sizes: Any, x: Tensor, **options: Any) -> Gradients:
    """Output and gradients of one pass, by name."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    with inside(made_by):
        out = module(x, sizes, **options)
    out.backward(normal(*out.shape, seed=2, dtype=out.dtype))
    return {"y": out.detach(), "dx": x.grad} | {name: p.grad for name, p in module.named_parameters()}


def alone(module: te.GroupedLinear, made_by: Recipe | None, sizes: list[int], passes: list[Tensor]) -> Gradients:
    """What a Linear for every group computes in the last of several passes, zeros behind the last group."""
    rows = len(passes[0])
    found: dict[str, Any] = {"y": torch.zeros(rows, OUT), "dx": torch.zeros(rows, IN)}
    begin = 0
    for number, size in enumerate(sizes):
        twin, its = te.Linear(IN, OUT), slice(begin, begin + size)
        with torch.no_grad():
            weight = getattr(module, f"weight{number}")
            twin.weight.copy_(weight.dequantize() if isinstance(weight, te.QuantizedTensor) else weight)
            twin.bias.copy_(getattr(module, f"bias{number}"))
        for whole in passes:
            x = whole[its].detach().requires_grad_()
            twin.zero_grad()
            with inside(made_by):
                out = twin(x)
            out.backward(normal(rows, OUT, seed=2)[its])
        found["y"][its], found["dx"][its] = out.detach(), x.grad
        found |= {f"weight{number}": twin.weight.grad, f"bias{number}": twin.bias.grad}
        begin += size
    return found


def of_sizes() -> Iterator[Any]:
    """Every recipe with every list of sizes; in every run most recipes with one."""
    for (name, made_by), (how, sizes) in product(COMPUTED.items(), SIZES.items()):
        is_one_of_few = name in ("plain", "delayed", "block", "mxfp8", "nvfp4") or how == "ragged"
        yield pytest.param(made_by, sizes, id=f"{name}-{how}", marks=() if is_one_of_few else pytest.mark.exhaustive)


@pytest.mark.parametrize(("made_by", "sizes"), list(of_sizes()))
def test_every_group_is_as_if_it_were_alone(made_by: Recipe | None, sizes: list[int]) -> None:
    module = make(len(sizes))
    passes = [normal(sum(sizes) + SPARE, IN, seed=seed) for seed in (1, 5)]
    for x in passes:
        got = step(module, made_by, sizes, x)
    want = alone(module, made_by, sizes, passes)
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert relative_error(value, want[name]) < 2e-6, name


@pytest.mark.parametrize("name", [name for name in COMPUTED if name not in NO_PARAMETER])
def test_quantized_and_plain_weights_give_the_same_bits(name: str) -> None:
    made_by, sizes, x = COMPUTED[name], SIZES["ragged"], normal(180, IN, dtype=torch.bfloat16)
    options = dict(params_dtype=torch.bfloat16)
    plain, quantized = (step(make(4, by, **options), made_by, sizes, x) for by in (None, made_by))
    for key, value in quantized.items():
        assert_bitwise(value, plain[key], key)


@every_recipe
def test_sizes_may_be_a_list_a_tensor_or_a_table(made_by: Recipe | None) -> None:
    sizes, x = SIZES["ragged"], normal(180, IN)
    want = step(make(4), made_by, sizes, x)
    tensor = torch.tensor(sizes)
    for given in (tensor, tensor.int(), group_table(tensor, len(x))):
        for key, value in step(make(4), made_by, given, x).items():
            assert_bitwise(value, want[key], key)


def test_sizes_that_do_not_fit_are_refused() -> None:
    module, x = make(2), normal(10, IN)
    for wrong in ([5], [5, 6], [-1, 5]):
        with pytest.raises(ValueError, match="m_splits has 2 sizes of 0 or more, which add up to at most the 10 rows"):
            module(x, wrong)
    for wrong in ([5, 6], [-1, 5]):
        with pytest.raises(ValueError, match="add up to at most the 10 rows"):
            module(x, torch.tensor(wrong))
    for tensor in (torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0])):
        with pytest.raises(ValueError, match=r"m_splits is an int32 or int64 tensor of shape \(2,\)"):
            module(x, tensor)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_has_no_product_in_groups_is_refused(name: str) -> None:
    made_by = CASES[name].recipe
    with pytest.raises(NotImplementedError, match="no products in groups of"):
        make(2, made_by)
    with te.autocast(recipe=made_by), pytest.raises(NotImplementedError, match="no products in groups of"):
        make(2)(normal(10, IN), [5, 5])


@pytest.mark.parametrize("name", [name for name in COMPUTED if name not in NO_PARAMETER])
def test_quantized_weights_stand_for_their_values_outside_of_autocast(name: str) -> None:
    sizes, x, module = SIZES["ragged"], normal(180, IN), make(4, COMPUTED[name])
    got, plain = step(module, None, sizes, x), make(4)
    with torch.no_grad():
        for number in range(4):
            getattr(plain, f"weight{number}").copy_(getattr(module, f"weight{number}").dequantize())
    want = step(plain, None, sizes, x)
    for key, value in got.items():
        if key == "dx" and not module.weight0.format.columnwise_is_derivable:
            continue  # by the columnwise direction, which has other values
        assert relative_error(value, want[key]) < 1e-6, key


def test_quantized_inputs_are_refused_outside_of_autocast() -> None:
    x = te.Float8BlockQuantizer(block_scaling_dim=1)(normal(10, IN))
    with pytest.raises(ValueError, match="the input is quantized, and there is no product in groups of it with plain"):
        make(2)(x, [5, 5])


def test_types_may_differ_between_input_weights_and_biases() -> None:
    sizes, x = SIZES["ragged"], normal(180, IN, dtype=torch.bfloat16)
    wide = step(make(4), None, sizes, x)
    narrow = step(make(4).bfloat16(), None, sizes, x)
    assert wide["y"].dtype == wide["dx"].dtype == torch.bfloat16
    assert wide["weight1"].dtype == wide["bias1"].dtype == torch.float32
    for name, value in wide.items():
        assert relative_error(value, narrow[name]) < 4e-3, name


@pytest.mark.parametrize("name", ["plain", "block", "nvfp4"])
def test_weights_are_quantized_once_for_several_microbatches(name: str) -> None:
    made_by, sizes = COMPUTED[name], SIZES["ragged"]
    passes = [normal(180, IN, seed=seed) for seed in range(3)]
    want = [step(make(4), made_by, sizes, x) for x in passes]
    module = make(4)
    for number, x in enumerate(passes):
        for key, value in step(module, made_by, sizes, x, is_first_microbatch=number == 0).items():
            assert_bitwise(value, want[number][key], key)


WRITES: dict[str, Callable[[torch.nn.Module], object]] = {
    "op": lambda module: module.weight1.detach().add_(1.0),
    **{
        f"AdamW {options}": lambda module, options=options: torch.optim.AdamW(module.parameters(), **options).step()
        for options in ({}, {"foreach": True}, {"fused": True})
    },
    "fused, then a hook": lambda module: _dropping(torch.optim.AdamW(module.parameters(), fused=True)).step(),
}


def _dropping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Drops gradients behind its steps."""
    optimizer.register_step_post_hook(lambda its, *_: its.zero_grad())
    return optimizer


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_weights_that_were_kept_are_never_stale(write: Callable[[torch.nn.Module], object]) -> None:
    made_by, module, x = recipe.Float8BlockScaling(), make(2), normal(10, IN)
    with te.autocast(recipe=made_by), pytest.raises(RuntimeError, match="there was none"):
        module(x, [5, 5], is_first_microbatch=False)
    step(module, made_by, [5, 5], x, is_first_microbatch=True)
    for weight in module.parameters():
        weight.grad = torch.ones_like(weight)
    write(module)
    with te.autocast(recipe=made_by), pytest.raises(RuntimeError, match="they, or the recipe, have changed since"):
        module(x, [5, 5], is_first_microbatch=False)


@pytest.mark.parametrize("quantized", [False, True])
@every_recipe
def test_one_parameter_of_all_groups_gives_the_bits_of_one_for_each(made_by: Recipe | None, quantized: bool) -> None:
    name = next(name for name, found in COMPUTED.items() if found is made_by)
    if quantized and name in NO_PARAMETER:
        pytest.skip("its weights cannot be parameters")
    sizes, x, of = SIZES["ragged"], normal(180, IN), made_by if quantized else None
    want = step(make(4, of), made_by, sizes, x)
    for weight, bias in ((True, False), (False, True), (True, True)):
        module = make(4, of, single_grouped_weight=weight, single_grouped_bias=bias)
        if not bias:  # drawn in another order
            for number in range(4):
                getattr(module, f"bias{number}").data.copy_(getattr(make(4, of), f"bias{number}"))
        got = step(module, made_by, sizes, x)
        for key, value in want.items():
            kind = key.rstrip("0123456789")
            found = got[key] if key in got else got[kind][int(key[len(kind) :])]
            assert_bitwise(found, value, key)


def test_a_recipe_without_a_product_for_the_gradient_is_refused_when_made() -> None:
    def mixed(role: recipe.QuantizerRole) -> te.quantizers.Quantizer:
        return te.Float8BlockQuantizer() if role.tensor_type == "weight" else te.IdentityQuantizer()

    def unlike(role: recipe.QuantizerRole) -> te.quantizers.Quantizer:
        is_block = role.tensor_type == "input"
        return te.Float8BlockQuantizer(block_scaling_dim=1) if is_block else te.IdentityQuantizer()

    make(2, recipe.CustomRecipe(mixed))
    with pytest.raises(NotImplementedError, match="no products in groups of Block by HighPrecision"):
        make(2, recipe.CustomRecipe(unlike))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_2d", "hybrid"])
def test_features_are_multiples_of_64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of scale bytes end inside of a word."""
    monkeypatch.setitem(globals(), "IN", 192)
    monkeypatch.setitem(globals(), "OUT", 320)
    test_every_group_is_as_if_it_were_alone(COMPUTED[name], SIZES["ragged"])
    test_quantized_and_plain_weights_give_the_same_bits(name)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", [name for name in COMPUTED if name not in NO_PARAMETER])
def test_kernels_read_features_that_are_multiples_of_64(name: str, quantized: bool) -> None:
    made_by = COMPUTED[name]
    with te.quantized_model_init(enabled=quantized, recipe=made_by):
        module = te.GroupedLinear(4, 2880, 5760, single_grouped_weight=True, device="meta", params_dtype=torch.bfloat16)
    if not quantized:
        te.prepare(module, made_by)
    with recording() as specs:
        module.rehearse(torch.bfloat16)
    products = {spec.template.split(",")[0] for spec in specs if spec.template.startswith("Gem")}
    assert len([product for product in products if product.startswith("GemmStaged")]) in (0, 2), products
