"""Objects made again from their text, and nothing but these."""

from __future__ import annotations

import pytest
import torch

from te_dist import recipe
from te_dist.catalog import FORMATS
from te_dist.formats import Region
from te_dist.nn.spelled import made_of
from te_dist.nn.traced import Kind

RECIPES = [
    recipe.DelayedScaling(margin=2, fp8_format=recipe.Format.E4M3),
    recipe.Float8BlockScaling(amax_epsilon=1e-4),
    recipe.Float8CurrentScaling(fp8_format=recipe.Format.HYBRID, use_power_2_scales=True),
    recipe.MXFP8BlockScaling(enable_2d_quantization=True),
    recipe.NVFP4BlockScaling(disable_rht=True),
]


@pytest.mark.parametrize(
    "made", [*RECIPES, *FORMATS.values(), Region.whole(3, 5)], ids=lambda each: type(each).__name__
)
def test_what_was_described_is_made_again(made: object) -> None:
    assert made_of(repr(made)) == made


def test_further_classes_are_named_by_who_asks() -> None:
    kind = Kind(FORMATS["nvfp4_1d"], Region.whole(4, 32), torch.bfloat16, torch.Size((4, 32)), ("row_data",))
    assert made_of(repr(kind), Kind) == kind
    with pytest.raises(ValueError, match="not the text of a recipe"):
        made_of(repr(kind))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "Region(rows=open('x'), cols=1)",
        "torch.load('x')",
        "torch.float32.is_signed",
        "Format.__class__",
        "(lambda: 1)()",
        "[x for x in ()]",
        "Region(",
        "Region(**{})",
        "CustomRecipe(qfactory=<function f at 0x7f>)",
    ],
)
def test_nothing_else_is_called(text: str) -> None:
    with pytest.raises(ValueError, match="not the text of a recipe or a format"):
        made_of(text)
