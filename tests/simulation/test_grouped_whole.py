"""Products in groups of bf16, fp16 and FP8 with one scale, simulated, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist.kernels import grouped_whole
from te_dist.kernels.grouped_whole import Split
from tests.ops.groups import ROUNDING, table_of
from tests.ops.whole_groups import KINDS, Kind, RowsCase, SumsCase, multiply, sum_rows

SIZES = [3, 0, 70, 1, 3, 200, 64, 0]


@pytest.fixture(params=[Split(256, 1, band=3), Split(128, 2, band=3)], ids=str)
def split(request, monkeypatch):
    for name in ("products_split", "sums_split"):
        monkeypatch.setattr(grouped_whole, name, lambda *_: request.param)


def check(got: Tensor, want: Tensor) -> None:
    wrong = ~((got.double() - want).abs() <= (2.0**-20 + ROUNDING[got.dtype]) * want.abs() + 2.0**-18)
    assert not wrong.any(), f"{int(wrong.sum())} values are off, first at {wrong.nonzero()[0].tolist()}"


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], KINDS[3]], ids=str)
def test_product_of_each_group(kind, split, simulated):
    case = RowsCase(kind, SIZES, cols=328, depth=80)
    out = torch.full((sum(SIZES) + 9, 328), 5.0, dtype=torch.bfloat16)
    multiply(kind, case.a, case.b, case.scale, table=table_of(SIZES, len(case.a)), out=out)
    check(out[:-9], case.want)
    assert (out[-9:] == 5).all(), "rows behind the last group were written"


@pytest.mark.parametrize("how", ("bf16", "added"))
@pytest.mark.parametrize("kind", [Kind("bf16", "bf16", 0), KINDS[3]], ids=str)
def test_sum_over_the_rows_of_each_group(kind, how, split, simulated):
    rows, cols, groups = 136, 208, len(SIZES)
    case = SumsCase(kind, SIZES, rows, cols)
    before, dtype = (2.0, torch.float32) if how == "added" else (0.0, torch.bfloat16)
    out = torch.full((groups * rows, cols), before or torch.nan, dtype=dtype)
    table = table_of(SIZES, sum(SIZES))
    sum_rows(kind, case.a, case.b, case.scale, table=table, accumulate=how == "added", out=out)
    others = [group for group in range(groups) if group != case.poisoned or SIZES[group] == 0]
    check(out.view(groups, rows, cols)[others], case.want[others] + before)
