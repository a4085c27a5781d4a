"""Selective checkpointing: whatever a policy saves, te_dist's ops run again, and no bit changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import te_dist as te
from te_dist.context import current_autocast
from te_dist.recipe import NVFP4BlockScaling, Recipe
from te_dist.recompute import context_fn_with
from te_dist.testing import assert_bitwise
from tests.nn.recipes import CASES

ROWS, WIDTH = 32, 128
RECIPES = {name: CASES[name].recipe for name in ("current", "delayed", "block", "mxfp8")}
RECIPES["nvfp4"] = NVFP4BlockScaling()  # rounds by chance


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = te.GroupedLinear(2, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x, [ROWS // 2, ROWS // 2])


MODULES: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: te.LayerNormMLP(WIDTH, 2 * WIDTH),
    "swiglu": lambda: te.LayerNormMLP(WIDTH, 2 * WIDTH, activation="swiglu"),
    "grouped": Grouped,
}
TRAINED = [(m, r) for m in MODULES for r in RECIPES if (m, r) != ("grouped", "delayed")]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory that nobody wrote is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def train(module: nn.Module, recipe: Recipe | None, saved: str = "") -> tuple[list[Any], set[str]]:
    """(Output and gradients, ops that a policy was asked about); `saved` begins the names of those that it saves."""
    asked: set[str] = set()

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.add(str(op))
        return CheckpointPolicy.MUST_SAVE if str(op).startswith(saved) else CheckpointPolicy.PREFER_RECOMPUTE

    def run(x: Tensor) -> Tensor:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            return module(x).sin()

    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    y = run(x) if not saved else checkpoint(run, x, use_reentrant=False, context_fn=contexts)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(param.grad for param in module.parameters())], asked


def made(kind: str, recipe: Recipe | None) -> nn.Module:
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        return MODULES[kind]()


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise(a, b, f"result {index}")
        assert a.isfinite().all()


@pytest.mark.parametrize("saved", ["te_dist.quantize", "te_dist.", "aten.gelu"])
@pytest.mark.parametrize(("kind", "recipe"), TRAINED)
def test_what_a_policy_saves_changes_no_bit(kind: str, recipe: str, saved: str) -> None:
    want, _ = train(made(kind, RECIPES[recipe]), RECIPES[recipe])
    got, asked = train(made(kind, RECIPES[recipe]), RECIPES[recipe], saved)
    assert_same(got, want)
    assert asked and not [op for op in asked if op.startswith("te_dist.")]


@pytest.mark.parametrize("kind", MODULES)
def test_products_of_torch_are_saved(kind: str) -> None:
    want, _ = train(made(kind, None), None)
    got, asked = train(made(kind, None), None, "aten.mm.default" if kind == "grouped" else "aten.addmm.default")
    assert_same(got, want)
    assert asked & {"aten.mm.default", "aten.addmm.default"}


@pytest.mark.parametrize("kind", ["mlp", "swiglu"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_map_that_ran_before_is_run_again_by_the_same_ops(kind: str, recipe: str) -> None:
    modules = made(kind, RECIPES[recipe]), made(kind, RECIPES[recipe])
    for saved, module in zip(("aten.gelu", ""), modules, strict=True):
        train(module, RECIPES[recipe])
        module.zero_grad()
        for _ in range(2):  # a step whose loss is skipped, for one
            with te.autocast(recipe=RECIPES[recipe]):
                module(torch.ones(ROWS, WIDTH))
        results = train(module, RECIPES[recipe], saved)[0]
        if saved:
            got = results
    assert_same(got, results)


def test_every_op_that_returns_nothing_runs_again() -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("te_dist::")]
    ops = [getattr(torch.ops.te_dist, name.partition("::")[2]).default for name in names]
    writing = {op for op in ops if not op._schema.returns}
    assert len(writing) > 30
    assert writing <= SAC_IGNORED_OPS
    assert not {op for op in ops if op._schema.returns} & SAC_IGNORED_OPS


@pytest.mark.parametrize("compiled", [False, True])
def test_both_contexts_of_a_pass_that_is_selective_and_restores_the_recipe(compiled: bool) -> None:
    """Backward is outside of `autocast`, and the latest pass was by another recipe."""
    recipe = RECIPES["block"]
    found: list[list[Tensor]] = []
    counts = Counter[str]()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if str(op) == "aten.sin.default":
            counts["again" if context.is_recompute else "first"] += 1
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = made("mlp", recipe)

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x).sin()

    both = context_fn_with(partial(create_selective_checkpoint_contexts, policy))
    for recomputes in (False, True):
        block = Block()
        run = torch.compile(block, backend="aot_eager") if compiled else block
        torch.manual_seed(1)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        with te.autocast(recipe=recipe):
            y = checkpoint(run, x, use_reentrant=False, context_fn=both, early_stop=False) if recomputes else run(x)
        with te.autocast(recipe=RECIPES["mxfp8"]), torch.no_grad():
            block(x)
        y.square().mean().backward()
        found.append([y.detach(), x.grad, *(param.grad for param in block.parameters())])
    assert_same(*found)
    assert compiled or counts["first"] == 1


def test_both_contexts_are_entered_as_often_as_backward_runs() -> None:
    class Counts(AbstractContextManager[None]):
        entered = left = 0

        def __enter__(self) -> None:
            self.entered += 1
            assert current_autocast().recipe == RECIPES["block"]

        def __exit__(self, *raised: Any) -> None:
            self.left += 1

    counts, x = Counts(), torch.randn(ROWS, WIDTH, requires_grad=True)
    with te.autocast(recipe=RECIPES["block"]):
        y = checkpoint(
            made("mlp", RECIPES["block"]),
            x,
            use_reentrant=False,
            context_fn=context_fn_with(lambda: (nullcontext(), counts)),
        )
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert (counts.entered, counts.left) == (2, 2)
    assert current_autocast().recipe is None
