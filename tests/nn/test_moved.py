"""Modules that are moved or converted: parameters stay the objects they were, with what others have noted on them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import te_dist as te
from te_dist import fsdp2, optim, recipe
from te_dist.nn.moe import MoE, Routing
from te_dist.testing import assert_bitwise

BLOCK = recipe.Float8BlockScaling()
MAKES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: te.Linear(64, 64),
    "grouped, each": lambda: te.GroupedLinear(2, 64, 64),
    "grouped, one": lambda: te.GroupedLinear(2, 64, 64, single_grouped_weight=True),
    "mixture": lambda: MoE(64, 32, Routing(4, 2), shared_ffn_hidden_size=32),
}
CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda module: module.to("cpu"),
    "bfloat16": lambda module: module.bfloat16(),
    "half": lambda module: module.half(),
    "and back": lambda module: module.bfloat16().float(),
}
conversions = pytest.mark.parametrize("conversion", CONVERSIONS)
every_kind = pytest.mark.parametrize("kind", MAKES)


def make(kind: str, *, quantized: bool = True, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=quantized, recipe=BLOCK), torch.device(device):
        return MAKES[kind]()


def run(module: nn.Module, kind: str) -> None:
    weight = next(module.parameters())
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    with te.autocast(recipe=BLOCK):
        out = module(x, [8, 8]) if kind.startswith("grouped") else module(x)
    out.float().square().sum().backward()


def quantized_of(module: nn.Module) -> dict[str, Any]:
    return {name: param for name, param in module.named_parameters() if hasattr(param, "storage")}


@conversions
@every_kind
def test_parameters_keep_what_is_noted_on_them(kind: str, conversion: str) -> None:
    module, calls = make(kind), []
    before = quantized_of(module)
    assert before
    for param in before.values():
        param.no_decay = True
        param.register_hook(torch.zeros_like)
        param.register_post_accumulate_grad_hook(calls.append)
    watched = [weakref.ref(param) for param in before.values()]
    CONVERSIONS[conversion](module)
    after = quantized_of(module)
    assert list(dict(module.named_parameters())) == list(dict(make(kind).named_parameters()))
    assert all(after[name] is param is seen() for (name, param), seen in zip(before.items(), watched, strict=True))
    assert all(param.no_decay for param in after.values())
    run(module, kind)
    assert len(calls) == len(after)
    assert not any(param.grad.any() for param in after.values())


@conversions
@every_kind
def test_passes_are_those_of_a_module_made_so(kind: str, conversion: str) -> None:
    """Gradients that are there are converted along; those of the next pass are of the new type."""
    module = make(kind)
    run(module, kind)
    gradients = {name: param.grad.clone() for name, param in module.named_parameters()}
    CONVERSIONS[conversion](module)
    dtype = next(module.parameters()).dtype
    for name, param in module.named_parameters():
        passed = gradients[name].bfloat16() if conversion == "and back" else gradients[name]
        assert_bitwise(param.grad, passed.to(dtype), name)
    twin = make(kind)
    twin.load_state_dict(module.state_dict())
    twin.to(dtype)
    for each in (module, twin):
        each.zero_grad()
        run(each, kind)
    for (name, a), b in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert a.grad.dtype is dtype
        assert_bitwise(a.grad, b.grad, name)


def test_a_module_moves_while_others_hold_its_gradient_accumulators() -> None:
    """As DistributedDataParallel does."""
    module = make("linear")
    held = [param.expand_as(param).grad_fn.next_functions[0][0] for param in module.parameters() if param.dim() == 1]
    held += [torch.autograd.graph.get_gradient_edge(param).node for param in module.parameters()]
    run(module, "linear")
    module.bfloat16()
    run(module, "linear")
    assert module.weight.grad.dtype is torch.bfloat16
    assert held


def test_what_an_optimizer_holds_goes_on() -> None:
    module, twin = make("linear"), make("linear")
    each = [optim.FusedAdam(m.parameters(), lr=1e-2) for m in (module, twin)]
    for step in range(3):
        if step == 1:
            module.to("cpu")
        for m, optimizer in zip((module, twin), each, strict=True):
            m.zero_grad()
            run(m, "linear")
            optimizer.step()
    for a, b in zip(module.parameters(), twin.parameters(), strict=True):
        assert_bitwise(a.detach(), b.detach(), "weight")


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("way", ["to_empty", "materialize"])
def test_annotations_of_groups_are_there_behind_the_meta_device(way: str, quantized: bool) -> None:
    with te.quantized_model_init(enabled=quantized, recipe=BLOCK), torch.device("meta"):
        module = te.GroupedLinear(2, 64, 64, parallel_mode="column")
    module = (
        module.to_empty(device="cpu")
        if way == "to_empty"
        else fsdp2.materialize(module, device="cpu", seed=0) or module
    )
    for name in module.weight_names:
        weight: Any = module.get_parameter(name)
        assert (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride) == (True, 0, 1)


@every_kind
def test_a_conversion_that_is_refused_leaves_parameters_in_their_places(kind: str) -> None:
    module = make(kind)
    names = list(dict(module.named_parameters()))
    with pytest.raises(Exception, match="float64"):
        module.double()
    assert list(dict(module.named_parameters())) == names
