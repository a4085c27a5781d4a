"""Linear maps that compute alike have what they recorded in common, others have not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_dist as te
from te_dist import recipe
from te_dist.kernels.tape import Tapes
from te_dist.recipe import Recipe
from tests.nn.recipes import CASES


def tapes_of(made_by: Recipe, *, placed: Any = None, **options: Any) -> Tapes:
    """Those of a new Linear by the recipe."""
    module = te.Linear(96, 160, **options)
    module.gemm.placed = placed
    with te.autocast(recipe=made_by):
        plan = module.gemm.plan(torch.zeros(32, 96), module.weight)
    assert plan is not None
    return plan.tapes


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_maps_share_them_unless_the_recipe_may_tell_maps_apart(case: Any) -> None:
    has_names = isinstance(case.recipe, recipe.CustomRecipe)
    assert (tapes_of(case.recipe, name="first") is tapes_of(case.recipe, name="second")) != has_names
    assert tapes_of(case.recipe) is not tapes_of(case.recipe, fuse_wgrad_accumulation=True)


def test_recipes_of_others_and_quantizers_that_are_placed_have_their_own() -> None:
    class Mine(recipe.Float8BlockScaling):
        pass

    assert tapes_of(Mine()) is not tapes_of(Mine())
    known = recipe.Float8BlockScaling()
    assert tapes_of(known) is not tapes_of(known, placed=lambda _, quantizer: quantizer)
