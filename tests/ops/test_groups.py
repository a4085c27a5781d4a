"""Tables of groups and products in groups, on CPU tensors, against loops over the groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.ops.group_table import one_group
from te_dist.testing import assert_bitwise
from tests.ops.groups import RUN, SQUARE, Operand, group_ends, table_of

SIZES = [[128], [0, 5, 0, 300, 1, 0], [64, 64, 256, 16], [0, 0], [1] * 40, [191, 193, 257, 129]]


def check(got: Tensor, want: Tensor, a: Tensor, b: Tensor) -> None:
    """Up to what rounding in fp32 makes of sums of these products."""
    assert ((got.double() - want).abs() <= 2**-20 * (1 + a.abs() @ b.abs().t())).all()


@pytest.mark.parametrize("are_sizes", (False, True))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_table_counts_rows_and_tiles_before_each_group(sizes, dtype, are_sizes):
    table = torch.full((4, len(sizes) + 1), -1, dtype=torch.int32)
    given = torch.tensor(sizes) if are_sizes else group_ends(sizes)
    ops.group_table(given.to(dtype), rows=sum(sizes) + 7, out=table, are_sizes=are_sizes)
    for row, height in zip(table.tolist(), (1, 128, 192, 256), strict=True):
        assert row == [sum(-(-size // height) for size in sizes[:group]) for group in range(len(sizes) + 1)]


@pytest.mark.parametrize("rows", [0, 1, 128, 300])
def test_one_group_has_all_rows(rows):
    table = torch.full((4, 2), -1, dtype=torch.int32)
    ops.group_table(torch.tensor([rows]), rows=rows, out=table)
    assert torch.equal(one_group(rows, table.device), table)


def test_ends_behind_the_matrix_are_read_as_its_last_row():
    table = torch.full((4, 4), -1, dtype=torch.int32)
    ops.group_table(torch.tensor([10, 500, 900]), rows=300, out=table)
    assert table[0].tolist() == [0, 10, 300, 300]


def test_sizes_below_zero_are_read_as_zero_and_their_sum_ends_at_the_last_row():
    table = torch.full((4, 5), -1, dtype=torch.int32)
    ops.group_table(torch.tensor([10, -5, 500, 900]), rows=300, out=table, are_sizes=True)
    assert table[0].tolist() == [0, 10, 10, 300, 300]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_behind_the_last_group_become_zeros_and_no_others(sizes, dtype):
    out = torch.randn(sum(sizes) + 9, 20).to(dtype)
    want = out.clone()
    want[sum(sizes) :] = 0
    ops.clear_rest(out, table=table_of(sizes, len(out)))
    assert_bitwise(out, want, "rows")


@pytest.mark.parametrize("b_tile", (SQUARE, RUN))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_product_of_each_group(sizes, b_tile):
    rows, cols, depth, groups = sum(sizes) + 9, 48, 272, len(sizes)
    a, b = Operand(rows, depth, RUN, seed=1), Operand(cols, depth, b_tile, groups=groups, seed=2)
    bias, factor = torch.randn(groups, cols), torch.rand(rows)
    out = torch.full((rows, cols), 5.0)
    rest = dict(table=table_of(sizes, rows), b_tile=b_tile, fp8=("e4m3", "e4m3"), bias=bias, row_factor=factor)
    rest |= dict(accumulate=False)
    ops.grouped_gemm_float8_block(a.codes, a.scale, b.codes, b.scale, out=out, summed_dim=1, **rest)
    begin = 0
    for group, size in enumerate(sizes):
        its = slice(begin, begin + size)
        matrix = b.values[group * cols : (group + 1) * cols]
        want = (a.values[its] @ matrix.t() + bias[group]) * factor[its, None]
        check(out[its], want, a.values[its], matrix)
        begin += size
    assert_bitwise(out[begin:], torch.full_like(out[begin:], 5.0), "rows behind the last group")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_matrix_that_lies_the_other_way_gives_the_same_bits(sizes):
    rows, cols = sum(sizes) + 9, 48
    a, b = Operand(rows, 256, RUN, seed=1), Operand(cols, 256, SQUARE, groups=len(sizes), seed=2)
    rest = dict(table=table_of(sizes, rows), b_tile=SQUARE, fp8=("e4m3", "e4m3"), bias=None, row_factor=None)
    want, got = (torch.full((rows, cols), 5.0) for _ in range(2))
    for out, summed_dim, (codes, scale) in ((want, 1, (b.codes, b.scale)), (got, 0, b.turned())):
        ops.grouped_gemm_float8_block(
            a.codes, a.scale, codes, scale, out=out, summed_dim=summed_dim, accumulate=False, **rest
        )
    assert_bitwise(got, want, "products")


@pytest.mark.parametrize("accumulate", (False, True))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sum_over_the_rows_of_each_group(sizes, accumulate):
    depth = 128 * (sum(-(-size // 128) for size in sizes) + 1)
    a, b = Operand(40, depth, RUN, seed=3), Operand(24, depth, RUN, seed=4)
    out = torch.full((len(sizes) * 40, 24), 2.0)
    rest = dict(table=table_of(sizes, sum(sizes)), fp8=("e4m3", "e4m3"), accumulate=accumulate)
    ops.grouped_wgrad_float8_block(a.codes, a.scale, b.codes, b.scale, out=out, **rest)
    begin = 0
    for size, product in zip(sizes, out.chunk(len(sizes)), strict=True):
        end = begin + -(-size // 128) * 128
        columns = a.values[:, begin:end], b.values[:, begin:end]
        check(product, columns[0] @ columns[1].t() + (2.0 if accumulate else 0.0), *columns)
        begin = end


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": torch.zeros(47, 256, dtype=torch.uint8)}, "b: got shape"),
        ({"a_scale": torch.zeros(1, 64)}, "a_scale: got shape"),
        ({"bias": torch.zeros(48)}, "bias: got shape"),
        ({"row_factor": torch.zeros(63)}, "row_factor: got shape"),
        ({"accumulate": True, "out": torch.zeros(64, 48, dtype=torch.bfloat16)}, "out: got torch.bfloat16"),
        ({"table": torch.zeros(3, 3, dtype=torch.int32)}, "table: got shape"),
        ({"summed_dim": 2}, "summed_dim: got 2"),
        ({"summed_dim": 0}, "b: got shape"),
        ({"summed_dim": 0, "b": torch.zeros(512, 48, dtype=torch.uint8), "b_tile": RUN}, "summed_dim: got 0 .* runs"),
        (
            {
                "summed_dim": 0,
                "a": torch.zeros(64, 272, dtype=torch.uint8),
                "a_scale": torch.ones(3, 64),
                "b": torch.zeros(2 * 272, 48, dtype=torch.uint8),
            },
            "summed_dim: got 0 with 272 values",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    a, b = Operand(64, 256, RUN, seed=5), Operand(48, 256, SQUARE, groups=2, seed=6)
    arguments = dict(a=a.codes, a_scale=a.scale, b=b.codes, b_scale=b.scale, out=torch.zeros(64, 48))
    arguments |= dict(table=table_of([30, 30], 64), b_tile=SQUARE, fp8=("e4m3", "e4m3"), accumulate=False)
    arguments |= dict(bias=None, row_factor=None, summed_dim=1)
    with pytest.raises(ValueError, match=message):
        ops.grouped_gemm_float8_block(**(arguments | changes))
