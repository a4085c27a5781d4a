"""Products in groups of bf16, fp16 and FP8 with one scale, simulated, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.groups import ROUNDING, table_of
from tests.ops.whole_groups import (
    KINDS,
    SPLITS,
    Kind,
    RowsCase,
    SumsCase,
    choose,
    error_of_products,
    error_of_sums,
    multiply,
    sum_rows,
)

SIZES, SUMS_SIZES = [3, 0, 70, 1, 3, 200, 64, 0], [3, 0, 70, 1, 3, 600, 64, 0]


WIDE, NARROW = SPLITS[1:3]


def check(got: Tensor, want: Tensor) -> None:
    wrong = ~((got.double() - want).abs() <= (2.0**-20 + ROUNDING[got.dtype]) * want.abs() + 2.0**-18)
    assert not wrong.any(), f"{int(wrong.sum())} values are off, first at {wrong.nonzero()[0].tolist()}"


def cut() -> Iterator[Any]:
    """Kinds of products in both ways to cut them; in every run in one."""
    for kind, split in product((KINDS[0], KINDS[1], *KINDS[3:]), (WIDE, NARROW)):
        is_taken = split == (WIDE if kind in KINDS[::3] else NARROW)
        yield pytest.param(kind, split, id=f"{kind}-{split}", marks=() if is_taken else pytest.mark.exhaustive)


@pytest.mark.parametrize(("kind", "split"), list(cut()))
def test_product_of_each_group(kind, split, simulated, monkeypatch):
    choose(monkeypatch, split)
    case = RowsCase(kind, SIZES, cols=328, depth=80 if kind.is_half else 656)  # FP8: more stages than memory holds
    out = torch.full((sum(SIZES) + 9, 328), 5.0, dtype=torch.bfloat16)
    multiply(kind, case.a, case.b, case.scale, table=table_of(SIZES, len(case.a)), out=out)
    check(out[:-9], case.want)
    assert (out[-9:] == 5).all(), "rows behind the last group were written"


@pytest.mark.pairwise
@pytest.mark.parametrize("split", (WIDE, NARROW), ids=str)
@pytest.mark.parametrize("how", ("bf16", "added"))
@pytest.mark.parametrize("kind", [Kind("bf16", "bf16", 0), KINDS[3]], ids=str)
def test_sum_over_the_rows_of_each_group(kind, how, split, simulated, monkeypatch):
    choose(monkeypatch, split)
    rows, cols, groups = 136, 208, len(SUMS_SIZES)
    case = SumsCase(kind, SUMS_SIZES, rows, cols, poisons=how == "added")
    before, dtype = (2.0, torch.float32) if how == "added" else (0.0, torch.bfloat16)
    out = torch.full((groups * rows, cols), before or torch.nan, dtype=dtype)
    table = table_of(SUMS_SIZES, sum(SUMS_SIZES))
    sum_rows(kind, case.a, case.b, case.scale, table=table, accumulate=how == "added", out=out)
    check(out.view(groups, rows, cols)[case.right], case.want[case.right] + before)


def test_errors_of_long_sums(simulated):
    """Tensor cores keep 14 bits here as on a GPU."""
    assert error_of_products(8192, fast=False, device="cpu") < 3e-4
    assert error_of_sums(8192, "cpu") < 3e-4
    assert error_of_products(8192, fast=True, device="cpu") > 1e-3
