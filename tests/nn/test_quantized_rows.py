"""Inputs that come quantized, of a number of rows over which products do not sum."""

from __future__ import annotations

import pytest
import torch

import te_dist as te
from te_dist.catalog import FORMATS
from te_dist.recipe import NVFP4BlockScaling
from te_dist.tensor import quantize
from te_dist.testing import assert_bitwise

ROWS, WIDTH = 8, 64  # NVFP4 sums over multiples of 16 rows


def test_rows_that_nobody_sums_over_are_taken_as_they_are() -> None:
    made_by, linear = NVFP4BlockScaling(disable_stochastic_rounding=True), te.Linear(WIDTH, WIDTH)
    x = torch.randn(ROWS, WIDTH)
    quantized = quantize(x, FORMATS["nvfp4_1d"])
    with te.autocast(recipe=made_by):
        want = linear(x).detach()
        with pytest.raises(ValueError, match="8 rows does not fit the product with the gradient, .*multiples of 16"):
            linear(quantized)
        with torch.no_grad():
            assert_bitwise(linear(quantized), want, "without gradients")
        linear.weight.requires_grad_(False)
        assert_bitwise(linear(quantized).detach(), want, "of a frozen weight")
