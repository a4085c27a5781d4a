"""torch.export: what a graph holds is exported with the bits of eager mode, the rest is refused by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import te_dist as te
from te_dist.nn import graph_plans
from te_dist.nn.moe import MoE, Routing
from te_dist.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
)
from te_dist.testing import assert_bitwise

WIDTH, ROWS = 64, 32
RECIPES = [Float8BlockScaling(), Float8CurrentScaling(), MXFP8BlockScaling(), None]
MAPS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: te.Linear(WIDTH, WIDTH),
    "mlp": lambda: te.LayerNormMLP(WIDTH, WIDTH),
    "grouped": lambda: te.GroupedLinear(2, WIDTH, WIDTH),
}
MAKES = MAPS | {"mixture": lambda: MoE(WIDTH, WIDTH, Routing(4, 2))}


class Evaluated(nn.Module):
    """A module by a recipe."""

    def __init__(self, kind: str, recipe: Recipe | None) -> None:
        super().__init__()
        self.recipe, self.is_grouped = recipe, kind == "grouped"
        with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
            self.module = MAKES[kind]()
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return self.module(x, torch.tensor([ROWS // 2] * 2)) if self.is_grouped else self.module(x)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("kind", MAPS)
def test_an_exported_map_computes_the_same(kind: str, recipe: Recipe | None) -> None:
    model, x = Evaluated(kind, recipe), torch.randn(ROWS, WIDTH)
    program = torch.export.export(model, (x,))
    assert_bitwise(program.module()(x), model(x), kind)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_an_exported_map_takes_any_number_of_rows(kind: str, recipe: Recipe | None) -> None:
    model = Evaluated(kind, recipe)
    program = torch.export.export(model, (torch.randn(ROWS, WIDTH),), dynamic_shapes=({0: torch.export.Dim("rows")},))
    for rows in (ROWS, 3 * ROWS, 77):
        x = torch.randn(rows, WIDTH)
        assert_bitwise(program.module()(x), model(x), f"{kind} of {rows} rows")


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_an_exported_mixture_takes_any_number_of_tokens(recipe: Recipe | None, quantized: bool) -> None:
    model = Evaluated("mixture", recipe if quantized else None)
    model.recipe = recipe
    tokens = {0: torch.export.Dim("tokens", max=4096)}
    program = torch.export.export(model, (torch.randn(ROWS, WIDTH),), dynamic_shapes=(tokens,))
    for rows in (ROWS, 7 * ROWS, 77):
        x = torch.randn(rows, WIDTH)
        assert_bitwise(program.module()(x), model(x), f"{rows} tokens")


LOADED = """
import sys, torch, te_dist
from te_dist.testing import assert_bitwise
for path in sys.argv[1:]:
    x, want = torch.load(path + ".io")
    assert_bitwise(torch.export.load(path).module()(x), want, path)
"""


def test_exported_programs_run_in_other_processes(tmp_path: Path) -> None:
    """Which know neither their recipes nor their plans."""
    saved, x = [], torch.randn(ROWS, WIDTH)
    for number, (kind, recipe, quantized) in enumerate(product(MAKES, RECIPES, (False, True))):
        model = Evaluated(kind, recipe if quantized else None)
        model.recipe = recipe
        saved.append(str(tmp_path / f"{number}.pt2"))
        torch.export.save(torch.export.export(model, (x,)), saved[-1])
        torch.save((x, model(x).detach()), saved[-1] + ".io")
    subprocess.run([sys.executable, "-c", LOADED, *saved], check=True, timeout=300)


def test_plans_that_cannot_be_made_again_are_refused() -> None:
    made_by = CustomRecipe(lambda role: Float8BlockScaling().quantizer(role))
    model = Evaluated("linear", None)
    model.recipe = made_by
    program = torch.export.export(model, (torch.randn(ROWS, WIDTH),))
    (name,) = (node.args[4] for node in program.graph.nodes if "linear_forward" in str(node.target))
    assert isinstance(name, str)
    with pytest.raises(RuntimeError, match="another process has made computes by .*CustomRecipe.* export it again"):
        graph_plans.plan_named(name + " ")  # as if it were unknown


@pytest.mark.parametrize("kind", MAKES)
def test_what_keeps_state_in_python_is_refused(kind: str) -> None:
    model, x = Evaluated(kind, DelayedScaling()), torch.randn(ROWS, WIDTH)
    with pytest.raises(NotImplementedError, match=r": got DelayedScaling.* in torch.export, wanted"):
        torch.export.export(model, (x,))
    model.train()
    model(x).sum().backward()


@pytest.mark.parametrize("kind", MAKES)
def test_training_is_refused(kind: str) -> None:
    """When a module is exported, and when its program is run backward."""
    model, x = Evaluated(kind, Float8BlockScaling()), torch.randn(ROWS, WIDTH, requires_grad=True)
    program = torch.export.export(model, (x,))
    with pytest.raises(NotImplementedError, match="through a program of torch.export, wanted none"):
        (x + program.module()(x)).sum().backward()
    model.train()
    for strict in (False, True):
        with pytest.raises(Exception, match="got training mode in torch.export.*call eval"):
            torch.export.export(model, (x,), strict=strict)
