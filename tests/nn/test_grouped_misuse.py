"""What GroupedLinear is not to be given, and gradients that would have gone astray, of other modules too."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import te_dist as te
from te_dist import recipe
from te_dist.quantizers import HybridQuantizer, IdentityQuantizer
from te_dist.testing import assert_bitwise, pool

GROUPS, IN, OUT, SIZES = 3, 128, 128, [5, 0, 11]
RECIPE = recipe.Float8BlockScaling()


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(**options: Any) -> te.GroupedLinear:
    torch.manual_seed(0)
    return te.GroupedLinear(GROUPS, IN, OUT, bias=False, **options)


def backward(module: torch.nn.Module) -> None:
    with te.autocast(recipe=RECIPE):
        out = module(normal(sum(SIZES), IN), SIZES)
    out.backward(normal(sum(SIZES), OUT, seed=2))


@pytest.mark.parametrize("sizes", [[5.0, 0.0, 11.0], [5.7, 0, 10], "abc", None, [[5], [0], [11]]], ids=repr)
def test_sizes_that_are_no_whole_numbers_are_refused(sizes: Any) -> None:
    with pytest.raises(TypeError, match="m_splits is a list of whole numbers, an int tensor .* got "):
        make()(normal(sum(SIZES), IN), sizes)


def test_sizes_may_have_any_strides_and_be_scalars_of_any_library() -> None:
    module, x = make(), normal(sum(SIZES), IN)
    want = module(x, SIZES)
    strided = torch.tensor([SIZES, SIZES]).t()[:, 0]
    for sizes in (strided, list(torch.tensor(SIZES)), torch.tensor(SIZES).numpy(), tuple(SIZES)):
        assert_bitwise(module(x, sizes), want, "y")


@pytest.mark.parametrize("single", (False, True))
def test_weights_and_autocast_of_two_recipes_are_named(single: bool) -> None:
    with te.quantized_model_init(recipe=RECIPE):
        module = make(single_grouped_weight=single)
    words = "GroupedLinear: the weights are float8_block_2d, and autocast is by MXFP8BlockScaling; pass it the recipe"
    with pytest.raises(NotImplementedError, match=words), te.autocast(recipe=recipe.MXFP8BlockScaling()):
        module(normal(32, IN), [32, 0, 0])


def test_a_recipe_that_has_no_products_is_not_taken_for_another() -> None:
    with te.quantized_model_init(recipe=recipe.NVFP4BlockScaling()):
        module = make()
    made_by = recipe.NVFP4BlockScaling(row_scaled_activation=True)
    with pytest.raises(NotImplementedError, match="^no products in groups of NVFP4"), te.autocast(recipe=made_by):
        module(normal(32, IN), [32, 0, 0])


def test_a_number_of_groups_is_whole() -> None:
    with pytest.raises(TypeError, match=r"num_gemms is a whole number, got 4\.0"):
        te.GroupedLinear(4.0, IN, OUT)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", (RECIPE, "float8_block"), ids=("recipe", "name"))
def test_parts_of_a_hybrid_are_quantizers(given: Any) -> None:
    with pytest.raises(TypeError, match="columnwise_quantizer: got .*, wanted a quantizer"):
        HybridQuantizer(rowwise_quantizer=IdentityQuantizer(), columnwise_quantizer=given)


def test_an_input_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the input is \(..., rows, 128\), got shape \(128,\)"):
        make()(normal(IN), [1, 0, 0])


def test_an_output_in_memory_of_the_input_is_refused() -> None:
    module, memory = make(), normal(2 * sum(SIZES), IN)
    x, apart = memory[: sum(SIZES)], memory[sum(SIZES) :]
    for out in (x, memory[1 : 1 + sum(SIZES)]):
        with pytest.raises(ValueError, match="out: got memory of the input"):
            module(x, SIZES, out=out)
    with torch.no_grad():
        assert_bitwise(module(x, SIZES, out=apart), module(x, SIZES), "y")


@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_leave_delayed_gradients_to_the_original(how: Any) -> None:
    module, twin = make(delay_wgrad_compute=True), make()
    for each in (module, twin):
        backward(each)
    other = how(module)
    other.backward_dw()
    assert all(parameter.grad is None for each in (module, other) for parameter in each.parameters())
    module.backward_dw()
    for got, want in zip(module.parameters(), twin.parameters(), strict=True):
        assert_bitwise(got.grad, want.grad, "dw")


def test_hooks_run_once_delayed_gradients_are_there() -> None:
    module, seen = make(delay_wgrad_compute=True), []
    module.register_wgrad_accumulation_and_reduce_hooks(
        lambda: seen.append([parameter.grad is not None for parameter in module.parameters()])
    )
    backward(module)
    assert seen == []
    module.backward_dw()
    module.backward_dw()  # nothing is left
    assert seen == [[True] * GROUPS]


def replicate(rank: int, world: int) -> None:
    """Gradients that DistributedDataParallel would not reduce are refused; others are means."""
    for option in ("delay_wgrad_compute", "fuse_wgrad_accumulation"):
        wrapped = DistributedDataParallel(make(**{option: True}))
        with pytest.raises(ValueError, match="DistributedDataParallel reduces the gradients that backward returns"):
            backward(wrapped)
        with torch.no_grad(), te.autocast(recipe=RECIPE):
            wrapped(normal(sum(SIZES), IN), SIZES)
    dense = DistributedDataParallel(te.LayerNormLinear(IN, OUT, fuse_wgrad_accumulation=True))
    with (
        te.autocast(recipe=RECIPE),
        pytest.raises(ValueError, match="never see those of fuse_wgrad_accumulation"),
    ):
        dense(normal(16, IN))
    module, alone = make(), make()
    backward(DistributedDataParallel(module))
    backward(alone)
    for got, want in zip(module.parameters(), alone.parameters(), strict=True):
        assert_bitwise(got.grad, want.grad, "the mean of equal gradients")


def test_gradients_that_replicas_would_not_reduce_are_refused() -> None:
    pool(2).run(replicate)


def test_weights_of_several_formats_are_told_by_their_names() -> None:
    with te.quantized_model_init(recipe=RECIPE):
        module = make()
    module.weight1 = torch.nn.Parameter(normal(OUT, IN))
    found = "got float8_block_2d; mxfp8_1d; plain; quantize"
    with te.quantized_model_init(recipe=recipe.MXFP8BlockScaling()):
        module.weight2 = make().weight2
    with te.autocast(recipe=RECIPE), pytest.raises(ValueError, match=found):
        module(normal(sum(SIZES), IN), SIZES)
