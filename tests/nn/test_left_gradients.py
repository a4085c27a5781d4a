"""Gradients that `GroupedLinear` writes itself, in or behind backward: none is wrong, lost or found twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import te_dist as te
from te_dist import recipe
from te_dist.testing import assert_bitwise
from tests.nn.test_grouped_misuse import GROUPS, IN, OUT, RECIPE, SIZES, make, normal

ROWS = sum(SIZES)


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def assert_same(module: nn.Module, twin: nn.Module) -> None:
    for got, want in zip(gradients(module), gradients(twin), strict=True):
        assert_bitwise(got, want, "dw")


@pytest.mark.parametrize(
    ("made_by", "saves_original", "what", "is_read"),
    [
        (None, False, "input", True),
        (None, False, "gradient", True),
        (RECIPE, False, "input", False),
        (RECIPE, False, "gradient", False),
        (RECIPE, True, "input", True),
    ],
)
def test_what_is_read_later_may_not_have_been_written(made_by, saves_original, what, is_read) -> None:
    options = dict(save_original_input=saves_original)
    module, twin = make(delay_wgrad_compute=True, **options), make(**options)
    memory = {"input": normal(ROWS, IN), "gradient": normal(ROWS, OUT, seed=2)}
    for each in (twin, module):
        with te.autocast(enabled=made_by is not None, recipe=made_by):
            out = each(memory["input"], SIZES)
        out.backward(memory["gradient"])
    memory[what].zero_()
    if is_read:
        with pytest.raises(RuntimeError, match="written in place after backward, and backward_dw reads it"):
            module.backward_dw()
        module.discard_dw()
        module.backward_dw()
        assert gradients(module) == [None] * GROUPS
    else:
        module.backward_dw()
        assert_same(module, twin)


def test_gradients_of_a_step_that_is_not_taken_are_discarded() -> None:
    module, twin = make(delay_wgrad_compute=True), make()
    module(normal(ROWS, IN, seed=3), SIZES).sum().backward()
    module.discard_dw()
    for each in (module, twin):
        each(normal(ROWS, IN), SIZES).sum().backward()
    module.backward_dw()
    assert_same(module, twin)


def test_gradients_that_cannot_be_computed_are_left() -> None:
    module, twin = make(delay_wgrad_compute=True, fuse_wgrad_accumulation=True), make()
    for each in (module, module, twin, twin):
        each(normal(ROWS, IN), SIZES).backward(normal(ROWS, OUT, seed=2))
    with pytest.raises(RuntimeError, match=r"set weight\.main_grad"):
        module.backward_dw()
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    module.backward_dw()
    for parameter, want in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.main_grad, want.grad)


@pytest.mark.parametrize("option", ("delay_wgrad_compute", "fuse_wgrad_accumulation"))
def test_gradients_that_a_pass_was_not_asked_for_are_not_written(option) -> None:
    module, x = make(**{option: True}), normal(ROWS, IN).requires_grad_()
    main = [torch.zeros_like(parameter) for parameter in module.parameters()]
    for parameter, zeros in zip(module.parameters(), main, strict=True):
        parameter.main_grad = zeros

    def are_written() -> list[bool]:
        found = main if option == "fuse_wgrad_accumulation" else gradients(module)
        return [each is not None and bool(each.any()) for each in found]

    torch.autograd.grad(module(x, SIZES).sum(), [x])
    module.backward_dw()
    assert are_written() == [False] * GROUPS
    module(x, SIZES).sum().backward(inputs=[x, module.weight0])
    module.backward_dw()
    assert are_written() == [True, False, False]


def test_a_linear_map_adds_to_its_main_gradient_where_it_is_asked_for() -> None:
    module, x = te.Linear(IN, OUT, bias=False, fuse_wgrad_accumulation=True), normal(128, IN).requires_grad_()
    module.weight.main_grad = torch.zeros(OUT, IN)

    def out() -> Tensor:
        with te.autocast(recipe=RECIPE):
            return module(x).sum()

    torch.autograd.grad(out(), [x])
    assert not module.weight.main_grad.any()
    out().backward()
    assert module.weight.main_grad.any() and module.weight.grad is None


@pytest.mark.parametrize("made_by", (None, RECIPE, recipe.MXFP8BlockScaling()), ids=("plain", "block", "mxfp8"))
@pytest.mark.parametrize("what", ("input", "gradient"))
def test_a_gradient_is_not_written_over_what_is_still_read(what, made_by) -> None:
    module, twin = make(save_original_input=True), make(save_original_input=True)
    x, grad = normal(ROWS, IN).requires_grad_(), normal(ROWS, OUT, seed=2)
    buffer = x.detach() if what == "input" else grad
    with te.autocast(enabled=made_by is not None, recipe=made_by):
        twin(x.clone(), SIZES).backward(grad.clone())
        out = module(x, SIZES, dgrad_out=buffer)
    if what == "gradient" and made_by is not None:  # is quantized when dgrad_out is written
        out.backward(grad)
        return assert_same(module, twin)
    with pytest.raises(ValueError, match=rf"dgrad_out: got memory of the {what}"):
        out.backward(grad)


def test_weights_that_were_computed_have_no_delayed_gradients() -> None:
    module = make(delay_wgrad_compute=True)
    doubled = {name: parameter * 2 for name, parameter in module.named_parameters()}
    with pytest.raises(ValueError, match="weights that were computed from others"):
        torch.func.functional_call(module, doubled, (normal(ROWS, IN), SIZES))


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_weights_may_be_parametrized() -> None:
    module, twin = make(), make()
    parametrize.register_parametrization(module, "weight0", Double())
    x, grad = normal(ROWS, IN), normal(ROWS, OUT, seed=2)
    for each in (module.float(), twin):  # which packs parameters anew
        each(x, SIZES).backward(grad)
    assert_bitwise(module.parametrizations.weight0.original.grad, 2 * twin.weight0.grad, "dw")


def test_experts_are_differentiated_where_a_graph_is_made_of_it() -> None:
    module: Any = te.nn.MoE(IN, OUT, te.nn.Routing(num_experts=4, top_k=2))
    x = normal(32, IN).requires_grad_()
    (want,) = torch.autograd.grad(module(x).square().sum(), x)
    (got,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    assert_bitwise(got.detach(), want, "dx")


def test_weights_of_another_number_of_groups_are_named() -> None:
    other = te.GroupedLinear(GROUPS + 2, IN, OUT, bias=False, single_grouped_weight=True)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "weight0"'):
        make().load_state_dict(other.state_dict())
