"""Products of FP8 blocks in groups against the products of their values in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.kernels import grouped_gemm
from te_dist.kernels.gemm import Tiling
from te_dist.ops.group_table import one_group
from te_dist.testing import assert_bitwise
from tests.ops.groups import ROUNDING, RUN, SIZES, SQUARE, Operand, check_product, group_ends, table_of

pytestmark = pytest.mark.gpu

TILINGS = [Tiling(*split, cluster, band=3) for split, cluster in product([(2, 1), (2, 2), (3, 1)], (1, 2))]
WIDE = [Tiling(2, 1, cluster, cols=192, band=3) for cluster in (1, 2)]
CASES = [*product((SQUARE, RUN), TILINGS), *product((SQUARE,), WIDE)]


@pytest.fixture(params=TILINGS, ids=str)
def tiling(request, monkeypatch):
    for name in ("rows_tiling", "sums_tiling"):
        monkeypatch.setattr(grouped_gemm, name, lambda *_: request.param)


def multiply(a: Operand, b: Operand, table: Tensor, out: Tensor, **options: object) -> None:
    rest = dict(bias=None, row_factor=None, accumulate=False) | options
    place = dict(table=table, summed_dim=1, b_tile=b.tile, fp8=(a.fp8, b.fp8), out=out)
    ops.grouped_gemm_float8_block(a.codes, a.scale, b.codes, b.scale, **place, **rest)


def multiply_turned(a: Operand, b: Operand, table: Tensor, out: Tensor, **options: object) -> None:
    place = dict(table=table, summed_dim=0, b_tile=b.tile, fp8=(a.fp8, b.fp8), out=out)
    ops.grouped_gemm_float8_block(a.codes, a.scale, *b.turned(), **place, **options)


@pytest.mark.parametrize("are_sizes", (False, True))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_table_is_that_of_the_cpu(sizes, dtype, are_sizes):
    given, rows = (torch.tensor(sizes) if are_sizes else group_ends(sizes)).to(dtype), sum(sizes)
    want = torch.empty(4, len(sizes) + 1, dtype=torch.int32)
    ops.group_table(given, rows=rows, out=want, are_sizes=are_sizes)
    got = torch.full_like(want, -1, device="cuda")
    ops.group_table(given.cuda(), rows=rows, out=got, are_sizes=are_sizes)
    assert_bitwise(got.cpu(), want, "a group table")


@pytest.mark.parametrize("rows", [0, 1, 300])
def test_table_of_one_group_is_that_of_the_cpu(rows):
    assert_bitwise(one_group(rows, torch.device("cuda")).cpu(), one_group(rows, torch.device("cpu")), "a group table")


def test_table_of_ends_that_decrease_is_that_of_the_cpu():
    ends = torch.randint(-20, 4000, (1500,), generator=torch.Generator().manual_seed(0))
    want = torch.empty(4, 1501, dtype=torch.int32)
    ops.group_table(ends, rows=3800, out=want)
    got = torch.full_like(want, -1, device="cuda")
    ops.group_table(ends.cuda(), rows=3800, out=got)
    assert_bitwise(got.cpu(), want, "a group table")


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize(("b_tile", "tiling"), CASES, ids=str, indirect=["tiling"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_product_of_each_group(sizes, b_tile, dtype, tiling):
    rows, cols, depth, groups = sum(sizes) + 9, 200, 1168, len(sizes)
    a = Operand(rows, depth, RUN, seed=1, device="cuda")
    b = Operand(cols, depth, b_tile, groups=groups, seed=2, device="cuda")
    bias, factor = torch.randn(groups, cols, device="cuda"), torch.rand(rows, device="cuda")
    out = torch.full((rows, cols), 5.0, device="cuda", dtype=dtype)
    multiply(a, b, table_of(sizes, rows, "cuda"), out, bias=bias, row_factor=factor)
    begin = 0
    for group, size in enumerate(sizes):
        its, matrix = slice(begin, begin + size), b.values[group * cols : (group + 1) * cols]
        want = (a.values[its] @ matrix.t() + bias[group]) * factor[its, None]
        sums = a.values[its].abs() @ matrix.abs().t() + bias[group].abs()
        check_product(out[its], want, sums, f"group {group}")
        begin += size
    assert (out[begin:] == 5).all(), "rows behind the last group were written"


@pytest.mark.parametrize("how", ("fp32", "bf16", "fp16", "added"))
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_matrix_that_lies_the_other_way_gives_the_same_bits(sizes, how, tiling):
    rows, cols, depth, groups = sum(sizes) + 9, 720, 1152, len(sizes)
    a = Operand(rows, depth, RUN, seed=1, device="cuda")
    b = Operand(cols, depth, SQUARE, groups=groups, seed=2, device="cuda")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(how, torch.float32)
    rest = dict(bias=torch.randn(groups, cols, device="cuda"), row_factor=torch.rand(rows, device="cuda"))
    want, got = (torch.full((rows, cols), 5.0, device="cuda", dtype=dtype) for _ in range(2))
    multiply(a, b, table_of(sizes, rows, "cuda"), want, accumulate=how == "added", **rest)
    multiply_turned(a, b, table_of(sizes, rows, "cuda"), got, accumulate=how == "added", **rest)
    assert_bitwise(got, want, "products")


@pytest.mark.parametrize("how", ("fp32", "bf16", "added"))
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sum_over_the_rows_of_each_group(sizes, how, tiling):
    rows, cols, groups = 136, 200, len(sizes)
    depth = 128 * (sum(-(-size // 128) for size in sizes) + 1)
    a, b = (Operand(extent, depth, RUN, seed=extent, device="cuda") for extent in (rows, cols))
    before = 2.0 if how == "added" else 0.0
    dtype = torch.bfloat16 if how == "bf16" else torch.float32
    out = torch.full((groups * rows, cols), 2.0 if how == "added" else torch.nan, device="cuda", dtype=dtype)
    rest = dict(table=table_of(sizes, sum(sizes), "cuda"), fp8=("e4m3", "e4m3"), accumulate=how == "added")
    ops.grouped_wgrad_float8_block(a.codes, a.scale, b.codes, b.scale, out=out, **rest)
    begin = 0
    for group, (size, got) in enumerate(zip(sizes, out.chunk(groups), strict=True)):
        end = begin + -(-size // 128) * 128
        left, right = a.values[:, begin:end], b.values[:, begin:end]
        sums = left.abs() @ right.abs().t() + before
        check_product(got, left @ right.t() + before, sums, f"group {group}")
        begin = end


def test_graph_replays_with_other_groups():
    rows, cols, depth = 1000, 256, 512
    a = Operand(rows, depth, RUN, seed=3, device="cuda")
    b = Operand(cols, depth, SQUARE, groups=4, seed=4, device="cuda")
    ends = group_ends([250, 250, 250, 250]).cuda()
    table = torch.empty(4, 5, dtype=torch.int32, device="cuda")
    captured = torch.empty(rows, cols, device="cuda", dtype=torch.bfloat16)

    def step(out: Tensor) -> None:
        ops.group_table(ends, rows=rows, out=table)
        multiply(a, b, table, out)

    step(captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured)
    for sizes in ([0, 1000, 0, 0], [1, 17, 500, 400], [300, 0, 300, 0]):
        ends.copy_(group_ends(sizes))
        eager = torch.zeros_like(captured)
        step(eager)
        captured.zero_()
        graph.replay()
        assert_bitwise(captured, eager, f"groups of {sizes}")


@pytest.mark.parametrize("tiling", [*TILINGS, *WIDE], ids=str, indirect=True)
def test_products_repeat_their_bits(tiling):
    sizes = [513, 0, 700, 12, 300]
    a = Operand(1600, 1024, RUN, seed=5, device="cuda")
    b = Operand(512, 1024, SQUARE, groups=5, seed=6, device="cuda")
    table, first = table_of(sizes, 1600, "cuda"), torch.zeros(1600, 512, device="cuda")
    multiply(a, b, table, first)
    for _ in range(100):
        again = torch.zeros_like(first)
        multiply(a, b, table, again)
        assert_bitwise(again, first, "products in groups")
