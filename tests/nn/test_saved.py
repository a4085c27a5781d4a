"""What linear maps save: hooks that move it change no bit, hooks that decode it are refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import te_dist as te
from te_dist.nn import saved
from te_dist.recipe import Recipe
from te_dist.testing import assert_bitwise
from tests.nn.recipes import CASES

ROWS, WIDTH = 32, 128
RECIPES = {name: CASES[name].recipe for name in ("current", "delayed", "block", "mxfp8", "nvfp4", "nvfp4_plain")}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


class Grouped(nn.Module):
    def __init__(self, *, is_one: bool = False) -> None:
        super().__init__()
        self.map = te.GroupedLinear(2, WIDTH, WIDTH, bias=False, single_grouped_weight=is_one)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x, [ROWS // 2, ROWS // 2])


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: te.Linear(WIDTH, WIDTH),
    "mlp": lambda: te.LayerNormMLP(WIDTH, 2 * WIDTH, activation="swiglu"),
    "grouped": Grouped,
    "grouped_in_one": lambda: Grouped(is_one=True),
}
every_module = pytest.mark.parametrize("kind", MODULES)


def copied(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.size(), dtype=tensor.dtype).copy_(tensor)


DECODING: dict[str, Callable[[], AbstractContextManager]] = {
    "pinned": lambda: save_on_cpu(pin_memory=True),
    "copied": lambda: saved_tensors_hooks(copied, lambda tensor: tensor),
}
MOVING: dict[str, Callable[[], AbstractContextManager]] = {
    "unpinned": lambda: save_on_cpu(pin_memory=False),
    "elsewhere": lambda: saved_tensors_hooks(lambda tensor: tensor.to("cpu", copy=True), lambda tensor: tensor),
    "offloaded": lambda: te.offload.activations(min_bytes=0),
}


def train(
    kind: str, recipe: Recipe, hooks: AbstractContextManager, *, frozen: bool = False, quantized: bool = True
) -> list[Any]:
    """Gradients."""
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=quantized, recipe=recipe):
        module = MODULES[kind]().requires_grad_(not frozen)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with hooks, te.autocast(recipe=recipe):
        y = module(x)
    y.square().mean().backward()
    return [x.grad, *(param.grad for param in module.parameters() if param.requires_grad)]


@pytest.mark.pairwise
@every_recipe
@every_module
@pytest.mark.parametrize("hooks", DECODING.values(), ids=DECODING)
@pytest.mark.parametrize("quantized", [False, True])
def test_what_was_decoded_is_refused(kind: str, recipe: Recipe, hooks: Callable, quantized: bool) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"te_dist.offload.activations\(\)") as raised:
        train(kind, recipe, hooks(), quantized=quantized)
    assert "context_fn" not in str(raised.value)


@pytest.mark.pairwise
@every_recipe
@every_module
@pytest.mark.parametrize("hooks", DECODING.values(), ids=DECODING)
def test_frozen_weights_that_were_decoded_are_refused(kind: str, recipe: Recipe, hooks: Callable) -> None:
    if kind == "grouped":  # they lie in one buffer, which autograd does not save
        want, got = (train(kind, recipe, each, frozen=True) for each in (nullcontext(), hooks()))
        return assert_bitwise(got[0], want[0], "gradient")
    with pytest.raises(RuntimeError, match=r"^a hook on saved tensors decoded .* te_dist.offload.activations\(\)"):
        train(kind, recipe, hooks(), frozen=True)


@pytest.mark.pairwise
@every_recipe
@every_module
@pytest.mark.parametrize("hooks", MOVING.values(), ids=MOVING)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_was_moved_changes_no_bit(kind: str, recipe: Recipe, hooks: Callable, frozen: bool) -> None:
    want = train(kind, recipe, nullcontext(), frozen=frozen)
    got = train(kind, recipe, hooks(), frozen=frozen)
    assert len(got) == len(want)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise(a, b, f"gradient {index}")


def test_hooks_inside_of_a_recomputed_function_are_told_from_recomputation() -> None:
    recipe, module, x = RECIPES["block"], te.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        with DECODING["copied"]():
            return module(x)

    with te.autocast(recipe=recipe):
        y = te.checkpoint(run, x)
    with pytest.raises(RuntimeError, match="^a hook on saved tensors decoded"):
        y.sum().backward()


def test_both_reasons_are_named_where_torch_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "unpacks_by_checkpoint", lambda ctx: None)
    with pytest.raises(RuntimeError, match=r"te_dist.offload.activations\(\).*te_dist.recompute.context_fn"):
        train("linear", RECIPES["block"], DECODING["copied"]())
