"""Products of codes with scale bytes in groups against the products of their values in float64."""

from __future__ import annotations

import pytest
import torch

from te_dist import ops
from te_dist.kernels import grouped_decoded
from te_dist.kernels.gemm_staged import HEIGHTS
from te_dist.testing import assert_bitwise
from tests.ops.grouped_decoded import DecodedOperand, with_room
from tests.ops.groups import ROUNDING, SIZES, check_product, table_of

pytestmark = pytest.mark.gpu

LAYOUTS = [("e4m3", False), ("e5m2", True), ("e2m1", False)]  # kind, whether B is turned


@pytest.fixture(params=HEIGHTS, ids=str)
def height(request, monkeypatch):
    monkeypatch.setattr(grouped_decoded, "height_of", lambda *_, **__: request.param)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize(("kind", "turned"), LAYOUTS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_product_of_each_group(sizes, kind, turned, dtype, height):
    rows, cols, depth, groups = sum(sizes) + 9, 208, 384, len(sizes)
    place = dict(groups=groups, device="cuda")
    a = DecodedOperand(rows, depth, kind, seed=1, **place)
    shape = (cols, groups * depth) if turned else (groups * cols, depth)
    b = DecodedOperand(*shape, kind, seed=2, turned=turned, **place)
    bias, factor = torch.randn(groups, cols, device="cuda"), torch.rand(rows, device="cuda")
    out = torch.full((rows, cols), 5.0, device="cuda", dtype=dtype)
    rest = dict(table=table_of(sizes, rows, "cuda"), bias=bias, row_factor=factor)
    ops.grouped_gemm_decoded(a.coded, b.coded, out=out, **rest)
    begin = 0
    for group, (size, matrix) in enumerate(zip(sizes, b.values.chunk(groups, int(turned)), strict=True)):
        its = slice(begin, begin + size)
        by = a.factor(group) * b.factor(group)
        want = (by * (a.values[its] @ matrix.t()) + bias[group]) * factor[its, None]
        sums = by * (a.values[its].abs() @ matrix.abs().t()) + bias[group].abs()
        check_product(out[its], want, sums, f"group {group}")
        begin += size
    assert (out[begin:] == 5).all(), "rows behind the last group were written"


@pytest.mark.parametrize(("kind", "turned"), LAYOUTS)
def test_lines_of_scales_may_end_inside_a_word(kind, turned, height):
    sizes, cols, depth = [300, 0, 77], 2880, 2880
    a = DecodedOperand(400, depth, kind, seed=1, groups=3, device="cuda")
    shape = (cols, 3 * depth) if turned else (3 * cols, depth)
    b = DecodedOperand(*shape, kind, seed=2, groups=3, turned=turned, device="cuda")
    out, table = torch.full((400, cols), 5.0, device="cuda"), table_of(sizes, 400, "cuda")
    ops.grouped_gemm_decoded(with_room(a.coded), b.coded if turned else with_room(b.coded), out=out, table=table)
    matrices = b.values.chunk(3, int(turned))
    for group, its in ((0, slice(0, 300)), (2, slice(300, 377))):
        by, matrix = a.factor(group) * b.factor(group), matrices[group]
        want, sums = by * (a.values[its] @ matrix.t()), by * (a.values[its].abs() @ matrix.abs().t())
        check_product(out[its], want, sums, f"group {group}")
    assert (out[377:] == 5).all(), "rows behind the last group were written"


@pytest.mark.parametrize("how", ("fp32", "bf16", "added"))
@pytest.mark.parametrize(("kind", "turned"), [("e4m3", True), ("e4m3", False), ("e2m1", False)])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sum_over_the_rows_of_each_group(sizes, kind, turned, how, height):
    rows, cols, groups = 144, 208, len(sizes)
    depth = 128 * (sum(-(-size // 128) for size in sizes) + 1)
    place = dict(groups=groups, turned=turned, device="cuda")
    a, b = (DecodedOperand(extent, depth, kind, seed=extent, **place) for extent in (rows, cols))
    before = 2.0 if how == "added" else 0.0
    dtype = torch.bfloat16 if how == "bf16" else torch.float32
    out = torch.full((groups * rows, cols), 2.0 if how == "added" else torch.nan, device="cuda", dtype=dtype)
    table = table_of(sizes, sum(sizes), "cuda")
    ops.grouped_wgrad_decoded(a.coded, b.coded, table=table, out=out, accumulate=how == "added")
    begin = 0
    for group, (size, got) in enumerate(zip(sizes, out.chunk(groups), strict=True)):
        end = begin + -(-size // 128) * 128
        left, right = a.values[:, begin:end], b.values[:, begin:end]
        by = a.factor(group) * b.factor(group)
        check_product(
            got, by * (left @ right.t()) + before, by * (left.abs() @ right.abs().t()) + before, f"group {group}"
        )
        begin = end


@pytest.mark.parametrize(("kind", "turned"), LAYOUTS)
def test_products_repeat_their_bits(kind, turned, height):
    sizes = [513, 0, 700, 12, 300]
    place = dict(groups=5, device="cuda")
    a = DecodedOperand(1600, 1024, kind, seed=5, **place)
    shape = (512, 5 * 1024) if turned else (5 * 512, 1024)
    b = DecodedOperand(*shape, kind, seed=6, turned=turned, **place)
    table, first = table_of(sizes, 1600, "cuda"), torch.zeros(1600, 512, device="cuda")
    ops.grouped_gemm_decoded(a.coded, b.coded, table=table, out=first)
    for _ in range(100):
        again = torch.zeros_like(first)
        ops.grouped_gemm_decoded(a.coded, b.coded, table=table, out=again)
        assert_bitwise(again, first, "products in groups")


def test_what_the_copy_engine_cannot_read_is_refused():
    a, b = (DecodedOperand(rows, 256, "e4m3", seed=5, groups=2, device="cuda").coded for rows in (64, 96))
    wide = torch.zeros(64, 257, dtype=torch.uint8, device="cuda")
    table, out = table_of([30, 30], 64, "cuda"), torch.zeros(64, 48, device="cuda")
    with pytest.raises(ValueError, match="a: got codes with strides .* multiples of 16 bytes"):
        ops.grouped_gemm_decoded(a._replace(codes=wide[:, 1:]), b, table=table, out=out)
