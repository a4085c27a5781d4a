"""Products of codes with scale bytes in groups, simulated, against the products of their values in float64."""

from __future__ import annotations

import pytest
import torch

from te_dist import ops
from te_dist.kernels import grouped_decoded
from tests.ops.grouped_decoded import DecodedOperand, with_room
from tests.ops.groups import check_product, table_of

pytestmark = pytest.mark.usefixtures("simulated")

SIZES = [0, 5, 140, 1, 64, 0]


@pytest.mark.parametrize(
    ("kind", "turned", "height", "depth"),
    [("e4m3", False, 256, 256), ("e5m2", True, 128, 192), ("e2m1", False, 128, 256), ("e4m3", False, 128, 192)],
)
def test_product_of_each_group(kind, turned, height, depth, monkeypatch):
    monkeypatch.setattr(grouped_decoded, "height_of", lambda *_, **__: height)
    rows, cols, groups = sum(SIZES) + 9, 208, len(SIZES)
    a = DecodedOperand(rows, depth, kind, seed=1, groups=groups)
    shape = (cols, groups * depth) if turned else (groups * cols, depth)
    b = DecodedOperand(*shape, kind, seed=2, groups=groups, turned=turned)
    bias, factor = torch.randn(groups, cols), torch.rand(rows)
    out = torch.full((rows, cols), 5.0)
    table = table_of(SIZES, rows)
    codes = with_room(a.coded), b.coded if turned else with_room(b.coded)
    ops.grouped_gemm_decoded(*codes, out=out, table=table, bias=bias, row_factor=factor)
    begin = 0
    for group, (size, matrix) in enumerate(zip(SIZES, b.values.chunk(groups, int(turned)), strict=True)):
        its, by = slice(begin, begin + size), a.factor(group) * b.factor(group)
        want = (by * (a.values[its] @ matrix.t()) + bias[group]) * factor[its, None]
        sums = by * (a.values[its].abs() @ matrix.abs().t()) + bias[group].abs()
        check_product(out[its], want, sums, f"group {group}")
        begin += size
    assert (out[begin:] == 5).all(), "rows behind the last group were written"


@pytest.mark.parametrize(("kind", "turned", "adds"), [("e4m3", True, True), ("e2m1", False, False)])
def test_sum_over_the_rows_of_each_group(kind, turned, adds):
    rows, cols, groups = 144, 208, len(SIZES)
    depth = 128 * (sum(-(-size // 128) for size in SIZES) + 1)
    a, b = (DecodedOperand(extent, depth, kind, seed=extent, groups=groups, turned=turned) for extent in (rows, cols))
    before = 2.0 if adds else 0.0
    out = torch.full((groups * rows, cols), 2.0 if adds else torch.nan)
    ops.grouped_wgrad_decoded(a.coded, b.coded, table=table_of(SIZES, sum(SIZES)), out=out, accumulate=adds)
    begin = 0
    for group, (size, got) in enumerate(zip(SIZES, out.chunk(groups), strict=True)):
        end, by = begin + -(-size // 128) * 128, a.factor(group) * b.factor(group)
        left, right = a.values[:, begin:end], b.values[:, begin:end]
        want, sums = by * (left @ right.t()) + before, by * (left.abs() @ right.abs().t()) + before
        check_product(got, want, sums, f"group {group}")
        begin = end


@pytest.mark.parametrize(("kind", "turned"), [("e4m3", True), ("e4m3", False), ("e2m1", False)])
def test_groups_without_any_row_have_sums_of_zero(kind, turned):
    a, b = (DecodedOperand(extent, 0, kind, seed=1, groups=3, turned=turned) for extent in (144, 208))
    for adds in (False, True):
        out = torch.full((3 * 144, 208), 2.0)
        ops.grouped_wgrad_decoded(a.coded, b.coded, table=table_of([0] * 3, 0), out=out, accumulate=adds)
        assert (out == (2.0 if adds else 0.0)).all()
    rows = DecodedOperand(0, 128, kind, seed=1, groups=3)
    members = DecodedOperand(3 * 208, 128, kind, seed=2, groups=3)
    ops.grouped_gemm_decoded(rows.coded, members.coded, table=table_of([0] * 3, 0), out=torch.empty(0, 208))
