"""Products in groups of bf16, fp16 and FP8 with one scale, on CPU tensors, against float64; and how they are cut."""

from __future__ import annotations

import pytest
import torch

from te_dist import ops
from te_dist.kernels.gemm import SHARED_LIMIT
from te_dist.kernels.grouped_gemm import HEIGHTS
from te_dist.kernels.grouped_whole import (
    Split,
    holds,
    products_in_parts_split,
    products_split,
    sums_in_parts_split,
    sums_split,
)
from te_dist.kernels.runtime import recording
from te_dist.testing import assert_bitwise
from tests.ops.groups import table_of
from tests.ops.whole_groups import (
    KINDS,
    Kind,
    RowsCase,
    SumsCase,
    error_of_products,
    error_of_sums,
    multiply,
    sum_rows,
)

SIZES = [[128], [0, 5, 0, 300, 1, 0], [64, 64, 256, 16], [0, 0], [1] * 40, [191, 193, 257, 129]]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_product_of_each_group(sizes, kind):
    case = RowsCase(kind, sizes, cols=48, depth=80)
    out = torch.full((sum(sizes) + 9, 48), 5.0)
    table = table_of(sizes, len(case.a))
    multiply(kind, case.a, case.b, case.scale, table=table, out=out)
    assert torch.equal(out[:-9].double(), case.want)
    assert_bitwise(out[-9:], torch.full_like(out[-9:], 5.0), "rows behind the last group")
    rest = dict(bias=case.bias, row_factor=case.factor, accumulate=True)
    multiply(kind, case.a, case.b, case.scale, table=table, out=out, **rest)
    assert ((out[:-9] - case.want - case.ended()).abs() <= 2**-20 * (1 + 2 * case.want.abs())).all()


@pytest.mark.parametrize("poisons", (False, True))
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sum_over_the_rows_of_each_group(sizes, kind, poisons):
    case, groups = SumsCase(kind, sizes, 40, 24, poisons=poisons), len(sizes)
    out = torch.full((groups * 40, 24), torch.nan)
    place = dict(table=table_of(sizes, sum(sizes)), out=out)
    sum_rows(kind, case.a, case.b, case.scale, accumulate=False, **place)
    assert torch.equal(out.view(groups, 40, 24)[case.right].double(), case.want[case.right])
    out.fill_(2.0)
    sum_rows(kind, case.a, case.b, case.scale, accumulate=True, **place)
    assert torch.equal(out.view(groups, 40, 24)[case.right].double(), case.want[case.right] + 2)


@pytest.mark.parametrize("fast", (False, True))
def test_long_sums_are_as_exact_as_fp32(fast):
    assert error_of_products(32768, fast=fast, device="cpu") < 1e-5
    assert error_of_sums(32768, "cpu") < 1e-5


BF16 = Kind("bf16", "bf16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": torch.zeros(95, 64, dtype=torch.bfloat16)}, "b: got shape"),
        ({"b": torch.zeros(96, 64, dtype=torch.float16)}, "b: got torch.float16"),
        ({"a": torch.zeros(64, 64)}, "a: got torch.float32"),
        ({"a": torch.zeros(64, 0, dtype=torch.bfloat16)}, "a: got nothing to sum"),
        ({"summed_dim": 2}, "summed_dim: got 2"),
        ({"bias": torch.zeros(48)}, "bias: got shape"),
        ({"row_factor": torch.zeros(63)}, "row_factor: got shape"),
        ({"accumulate": True, "out": torch.zeros(64, 48, dtype=torch.bfloat16)}, "out: got torch.bfloat16"),
        ({"table": torch.zeros(3, 3, dtype=torch.int32)}, "table: got shape"),
    ],
)
def test_products_of_halves_refuse_what_does_not_fit(changes, message):
    arguments = dict(a=torch.zeros(64, 64, dtype=torch.bfloat16), b=torch.zeros(96, 64, dtype=torch.bfloat16))
    arguments |= dict(table=table_of([30, 30], 64), summed_dim=1, bias=None, row_factor=None, accumulate=False)
    with pytest.raises(ValueError, match=message):
        ops.grouped_gemm_half(**(arguments | dict(out=torch.zeros(64, 48)) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a_scale": torch.ones(3)}, "a_scale: got shape"),
        ({"b_scale": torch.ones(1, dtype=torch.float64)}, "b_scale: got torch.float64"),
        ({"fp8": ("e4m3", "e3m4")}, "fp8: got .*'e3m4'"),
        ({"b": torch.zeros(95, 128, dtype=torch.uint8)}, "b: got shape"),
    ],
)
@pytest.mark.parametrize("op", (ops.grouped_gemm_float8_tensor, ops.grouped_wgrad_float8_tensor))
def test_products_of_codes_refuse_what_does_not_fit(op, changes, message):
    sums = op is ops.grouped_wgrad_float8_tensor
    arguments = dict(a=torch.zeros(64, 128 * (1 + sums), dtype=torch.uint8), b=torch.zeros(96, 128, dtype=torch.uint8))
    arguments |= dict(a_scale=torch.ones(1), b_scale=torch.ones(2), table=table_of([30, 30], 64), fp8=("e4m3", "e4m3"))
    arguments |= dict(accumulate=False, out=torch.zeros(128, 96) if sums else torch.zeros(64, 48))
    arguments |= (
        dict(b=torch.zeros(96, 256, dtype=torch.uint8)) if sums else dict(bias=None, row_factor=None, fast=True)
    )
    op(**arguments)
    with pytest.raises(ValueError, match=message):
        op(**(arguments | changes))


def test_operands_of_sums_agree_in_their_rows():
    a, b = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(63, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="b: got shape"):
        ops.grouped_wgrad_half(a, b, table=table_of([64], 64), accumulate=False, out=torch.zeros(64, 64))


SHAPES = [(rows, cols, groups) for rows in (1, 200, 4096, 2**17) for cols in (8, 256, 768, 7168) for groups in (1, 128)]


def test_every_split_fits_shared_memory_and_the_table():
    splits = {products_split(*shape, itemsize) for shape in SHAPES for itemsize in (1, 2)}
    in_parts = {choose(*shape) for shape in SHAPES for choose in (products_in_parts_split, sums_in_parts_split)}
    assert {split.cols for split in in_parts} == {128, 192}
    for split in splits | in_parts | {sums_split(*shape) for shape in SHAPES}:
        for adds in (False, True):
            assert split.stages(adds=adds) >= 4
            assert split.shared_bytes(split.stages(adds=adds), adds=adds) <= SHARED_LIMIT
        assert split.rows in HEIGHTS


def test_small_groups_have_small_tiles():
    assert products_split(2**15, 4096, 8, 2) == products_split(2**15, 4096, 8, 1) == Split(256, 2)
    assert products_split(2**15, 4096, 32, 2) == Split(256, 1)
    assert products_split(2**15, 4096, 32, 1) == Split(128, 1)
    assert products_split(64, 512, 2, 2) == Split(128, 1)
    assert sums_split(4096, 7168, 8) == Split(256, 2)
    assert sums_split(128, 128, 1) == Split(128, 1)


def test_short_sums_are_added_in_tiles_that_hold_what_is_there():
    assert holds(128 * 512, 128, 1) and holds(32 * 1024, 32, 2)
    assert not holds(8 * 4096, 8, 1) and not holds(32 * 1536, 32, 2)
    assert sums_split(1536, 2048, 128, held=True) == Split(128, 1)
    assert sums_in_parts_split(1536, 2048, 128, held=True) == Split(128, 2)


def test_what_is_added_decides_over_tiles():
    table, out = (torch.empty(size, device="meta") for size in ((4, 9), (8 * 1536, 2048)))
    with recording() as specs:
        for rows, accumulate in ((512, True), (512, False), (4096, True)):
            a, b = (torch.empty(8 * rows, cols, dtype=torch.bfloat16, device="meta") for cols in (1536, 2048))
            ops.grouped_wgrad_half(a, b, table=table.int(), accumulate=accumulate, out=out)
    assert [int(spec.template.split(", ")[-4]) for spec in specs] == [128, 256, 256]


def test_tiles_in_parts_are_wide_where_that_takes_less_time():
    assert products_in_parts_split(2**15, 7168, 8) == sums_in_parts_split(4096, 7168, 8) == Split(192, 2)
    assert products_in_parts_split(2**15, 256, 8) == Split(128, 2)
    assert products_in_parts_split(64, 128, 2) == sums_in_parts_split(128, 128, 1) == Split(128, 1)


@pytest.mark.parametrize("fast", (False, True))
def test_only_fast_products_leave_all_of_a_sum_to_tensor_cores(fast):
    codes = lambda *shape: torch.empty(shape, dtype=torch.uint8, device="meta")  # noqa: E731
    scale, kind = torch.empty(1, device="meta"), Kind("e4m3", "e4m3", fast=fast)
    table = torch.empty(4, 3, dtype=torch.int32, device="meta")
    with recording() as specs:
        out = torch.empty(64, 48, device="meta")
        multiply(kind, codes(64, 128), codes(96, 128), (scale, scale), table=table, out=out)
        out = torch.empty(128, 48, device="meta")
        sum_rows(kind, codes(64, 256), codes(48, 256), (scale, scale), table=table, accumulate=False, out=out)
    assert ["Float32, true" in spec.template for spec in specs] == [not fast, True]
