"""Products in groups of bf16, fp16 and FP8 with one scale, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.testing import assert_bitwise
from tests.ops.groups import ROUNDING, SIZES, group_ends, table_of
from tests.ops.whole_groups import (
    KINDS,
    SPLITS,
    RowsCase,
    SumsCase,
    choose,
    error_of_products,
    error_of_sums,
    multiply,
    sum_rows,
)

pytestmark = pytest.mark.gpu

SUMS = [kind for kind in KINDS if (kind.summed_dim == 0 if kind.is_half else not kind.fast)]


@pytest.fixture(params=SPLITS, ids=str)
def split(request, monkeypatch):
    choose(monkeypatch, request.param)


def check(got: Tensor, want: Tensor, name: str) -> None:
    """`want`, which is exact, up to the rounding of what is added to it and of the output."""
    wrong = ~((got.double() - want).abs() <= (2.0**-20 + ROUNDING[got.dtype]) * want.abs() + 2.0**-18)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} values of {name} are off, first at {wrong.nonzero()[0].tolist()}: "
        f"{got[tuple(wrong.nonzero()[0])]}, wanted {want[tuple(wrong.nonzero()[0])]}"
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_product_of_each_group(sizes, kind, split):
    case = RowsCase(kind, sizes, cols=328, depth=272, device="cuda")
    out = torch.full((sum(sizes) + 9, 328), 5.0, device="cuda", dtype=torch.bfloat16)
    multiply(kind, case.a, case.b, case.scale, table=table_of(sizes, len(case.a), "cuda"), out=out)
    check(out[:-9], case.want, "products")
    assert (out[-9:] == 5).all(), "rows behind the last group were written"


@pytest.mark.parametrize("how", ("fp32", "fp16", "added"))
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("cols", (328, 333))
def test_product_ends_with_bias_and_factors(cols, kind, how):
    if kind.summed_dim == 0 and cols % 8:
        pytest.skip("rows of B are multiples of 16 bytes")
    sizes = SIZES["ragged"]
    case = RowsCase(kind, sizes, cols, depth=80, device="cuda")
    before = 2.0 if how == "added" else 0.0
    out = torch.full((sum(sizes) + 9, cols), before or torch.nan, device="cuda")
    out = out.to(torch.float16 if how == "fp16" else torch.float32)
    rest = dict(bias=case.bias, row_factor=case.factor, accumulate=how == "added")
    multiply(kind, case.a, case.b, case.scale, table=table_of(sizes, len(case.a), "cuda"), out=out, **rest)
    check(out[:-9], case.ended() + before, "products")


@pytest.mark.parametrize("kind", SUMS, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sum_over_the_rows_of_each_group(sizes, kind, split):
    check_sums(sizes, kind, "bf16")


@pytest.mark.parametrize("how", ("fp32", "added"))
@pytest.mark.parametrize("kind", SUMS, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sums_in_fp32(sizes, kind, how):
    check_sums(sizes, kind, how)


def check_sums(sizes, kind, how):
    for poisons in (False, True):
        check_some_sums(SumsCase(kind, sizes, 136, 208, "cuda", poisons=poisons), sizes, kind, how)


def check_some_sums(case, sizes, kind, how):
    rows, cols, groups = 136, 208, len(sizes)
    before = 2.0 if how == "added" else 0.0
    dtype = torch.bfloat16 if how == "bf16" else torch.float32
    out = torch.full((groups * rows, cols), before or torch.nan, device="cuda", dtype=dtype)
    table = table_of(sizes, sum(sizes), "cuda")
    sum_rows(kind, case.a, case.b, case.scale, table=table, accumulate=how == "added", out=out)
    check(out.view(groups, rows, cols)[case.right], case.want[case.right] + before, "sums")


def test_errors_of_long_sums():
    assert error_of_products(32768, fast=False, device="cuda") < 3e-4
    assert error_of_sums(32768, "cuda") < 3e-4
    assert error_of_products(32768, fast=True, device="cuda") < 1e-2


def test_graph_replays_with_other_groups():
    kind = KINDS[0]
    case = RowsCase(kind, [250, 250, 250, 241], cols=512, depth=512, device="cuda")
    ends, rows = group_ends([250, 250, 250, 250]).cuda(), len(case.a)
    case.a[-9:] = 1.0
    table = torch.empty(4, 5, dtype=torch.int32, device="cuda")
    captured = torch.empty(rows, 512, device="cuda", dtype=torch.bfloat16)
    sums = torch.empty(4 * 512, 512, device="cuda")

    def step(out: Tensor, sums: Tensor) -> None:
        ops.group_table(ends, rows=rows, out=table)
        multiply(kind, case.a, case.b, case.scale, table=table, out=out)
        sum_rows(kind, case.a, out, case.scale, table=table, accumulate=False, out=sums)

    step(captured, sums)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured, sums)
    for sizes in ([0, 1000, 0, 0], [1, 17, 500, 400], [300, 0, 300, 0]):
        ends.copy_(group_ends(sizes))
        eager, eager_sums = torch.zeros_like(captured), torch.zeros_like(sums)
        step(eager, eager_sums)
        captured.zero_()
        graph.replay()
        assert_bitwise(captured, eager, f"groups of {sizes}")
        assert_bitwise(sums, eager_sums, f"sums of groups of {sizes}")


@pytest.mark.parametrize("kind", SUMS, ids=str)
def test_products_repeat_their_bits(kind, split):
    sizes = [513, 0, 700, 12, 300]
    case = SumsCase(kind, sizes, 512, 768, "cuda", poisons=False)
    if kind.is_half:
        case.a, case.b = (torch.randn_like(side) for side in (case.a, case.b))
    else:
        case.a, case.b = (torch.randint(0, 64, side.shape, device="cuda").to(torch.uint8) for side in (case.a, case.b))
    table, first = table_of(sizes, sum(sizes), "cuda"), None
    for _ in range(100):
        out = torch.full((5 * 512, 768), torch.nan, device="cuda", dtype=torch.bfloat16)
        sum_rows(kind, case.a, case.b, case.scale, table=table, accumulate=False, out=out)
        first = out if first is None else first
        assert_bitwise(out, first, "sums of groups")


@pytest.mark.parametrize("kind", SUMS, ids=str)
def test_many_tiles_are_added_one_after_the_other(kind):
    """Tiles of one block fetch what they are added to into the same memory; the last rows are added by threads."""
    sizes = [(37 * group) % 300 for group in range(96)]
    case = SumsCase(kind, sizes, 264, 512, "cuda", poisons=False)
    table, want = table_of(sizes, sum(sizes), "cuda"), case.want
    out = torch.zeros(len(sizes) * 264, 512, device="cuda")
    for times in range(1, 51):
        sum_rows(kind, case.a, case.b, case.scale, table=table, accumulate=True, out=out)
        check(out.view_as(want), want * times, f"sums added {times} times")


@pytest.mark.parametrize("kind", KINDS[::3], ids=str)
def test_tiles_that_threads_write_wait_for_those_that_the_copy_engine_writes(kind, split):
    sizes = [64, 3, 128, 1] * 300
    case = RowsCase(kind, sizes, cols=256, depth=64, device="cuda")
    table = table_of(sizes, len(case.a), "cuda")
    out = torch.empty(len(case.a), 256, device="cuda", dtype=torch.bfloat16)
    for _ in range(100):
        out.fill_(torch.nan)
        multiply(kind, case.a, case.b, case.scale, table=table, out=out)
        check(out[:-9], case.want, "products")
