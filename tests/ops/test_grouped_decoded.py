"""Products of codes with scale bytes in groups, on CPU tensors, against loops over the groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.kernels.runtime import recording
from te_dist.testing import assert_bitwise
from tests.ops.grouped_decoded import KINDS, DecodedOperand, with_room
from tests.ops.groups import table_of

SIZES = [[128], [0, 5, 0, 300, 1, 0], [64, 64, 256, 16], [0, 0], [1] * 40]


def check(got: Tensor, want: Tensor, size: Tensor) -> None:
    """Up to what rounding in fp32 makes of sums of products whose magnitudes sum up to `size`."""
    assert ((got.double() - want).abs() <= 2**-20 * (1 + size)).all()


@pytest.mark.parametrize("depth", (256, 320))
@pytest.mark.parametrize("turned", (False, True))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_product_of_each_group(sizes, kind, turned, depth):
    if turned and kind == "e2m1":
        pytest.skip("two codes share a byte along the summed dimension")
    rows, cols, groups = sum(sizes) + 9, 48, len(sizes)
    a = DecodedOperand(rows, depth, kind, seed=1, groups=groups)
    b = DecodedOperand(
        *((cols, groups * depth) if turned else (groups * cols, depth)), kind, seed=2, groups=groups, turned=turned
    )
    bias, factor = torch.randn(groups, cols), torch.rand(rows)
    out = torch.full((rows, cols), 5.0)
    rest = dict(table=table_of(sizes, rows), bias=bias, row_factor=factor)
    ops.grouped_gemm_decoded(a.coded, b.coded, out=out, **rest)
    begin = 0
    for group, (size, matrix) in enumerate(zip(sizes, b.values.chunk(groups, int(turned)), strict=True)):
        its = slice(begin, begin + size)
        by = a.factor(group) * b.factor(group)
        want = (by * (a.values[its] @ matrix.t()) + bias[group]) * factor[its, None]
        check(out[its], want, by * (a.values[its].abs() @ matrix.abs().t()))
        begin += size
    assert_bitwise(out[begin:], torch.full_like(out[begin:], 5.0), "rows behind the last group")


@pytest.mark.parametrize("accumulate", (False, True))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sum_over_the_rows_of_each_group(sizes, kind, accumulate):
    depth, turned = 128 * (sum(-(-size // 128) for size in sizes) + 1), kind != "e2m1"
    a, b = (DecodedOperand(n, depth, kind, seed=n, groups=len(sizes), turned=turned) for n in (40, 24))
    out = torch.full((len(sizes) * 40, 24), 2.0)
    table = table_of(sizes, sum(sizes))
    ops.grouped_wgrad_decoded(a.coded, b.coded, table=table, out=out, accumulate=accumulate)
    begin = 0
    for group, (size, product) in enumerate(zip(sizes, out.chunk(len(sizes)), strict=True)):
        end = begin + -(-size // 128) * 128
        left, right = a.values[:, begin:end], b.values[:, begin:end]
        by = a.factor(group) * b.factor(group)
        check(product, by * (left @ right.t()) + (2.0 if accumulate else 0.0), by * (left.abs() @ right.abs().t()))
        begin = end


@pytest.mark.parametrize(
    ("side", "changes", "message"),
    [
        (
            "b",
            {"codes": torch.zeros(95, 256, dtype=torch.uint8), "scale": torch.zeros(95, 8, dtype=torch.uint8)},
            "b: got",
        ),
        ("a", {"scale": torch.zeros(64, 7, dtype=torch.uint8)}, "a.scale: got shape"),
        ("a", {"scale": None}, "a.scale: got None"),
        ("a", {"tile": (1, 16)}, "a.tile: got"),
        ("a", {"phase": (0, 16)}, "a.phase: got"),
        ("a", {"factor": torch.ones(3, 1)}, "a.factor: got shape"),
        ("b", {"kind": "bfloat16"}, "b.kind: got"),
        ("a", {"codes": torch.zeros(256, 64, dtype=torch.uint8).t()}, "groups cut"),
    ],
)
def test_operands_that_do_not_fit_are_refused(side, changes, message):
    operands = {
        name: DecodedOperand(rows, 256, "e4m3", seed=5, groups=2).coded for name, rows in (("a", 64), ("b", 96))
    }
    operands[side] = operands[side]._replace(**changes)
    with pytest.raises(ValueError, match=message):
        ops.grouped_gemm_decoded(**operands, table=table_of([30, 30], 64), out=torch.zeros(64, 48))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": torch.zeros(48)}, "bias: got shape"),
        ({"row_factor": torch.zeros(63)}, "row_factor: got shape"),
        ({"accumulate": True, "out": torch.zeros(64, 48, dtype=torch.bfloat16)}, "out: got torch.bfloat16"),
        ({"table": torch.zeros(3, 3, dtype=torch.int32)}, "table: got shape"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    a, b = (DecodedOperand(rows, 256, "e4m3", seed=5, groups=2).coded for rows in (64, 96))
    arguments = dict(table=table_of([30, 30], 64), out=torch.zeros(64, 48)) | changes
    with pytest.raises(ValueError, match=message):
        ops.grouped_gemm_decoded(a, b, **arguments)


def test_what_ends_inside_a_stage_is_refused():
    a, b = (DecodedOperand(rows, 96, "e4m3", seed=5, groups=2).coded for rows in (64, 96))
    with pytest.raises(ValueError, match="wanted a multiple of 64; pad with zero codes"):
        ops.grouped_gemm_decoded(a, b, table=table_of([30, 30], 64), out=torch.zeros(64, 48))
    with pytest.raises(ValueError, match="padded to tiles with zeros"):
        ops.grouped_wgrad_decoded(a, b, table=table_of([30, 30], 64), out=torch.zeros(128, 96))


def test_scales_without_room_for_whole_words_are_refused():
    table, out = torch.empty(4, 3, dtype=torch.int32, device="meta"), torch.empty(64, 48, device="meta")
    a, b = (DecodedOperand(rows, 192, "e4m3", seed=5, groups=2, device="meta").coded for rows in (64, 96))
    with recording() as specs, pytest.raises(ValueError, match="b: got codes .* with room for whole words"):
        ops.grouped_gemm_decoded(with_room(a), b, table=table, out=out)
    plane = torch.empty(96 * 8 - 2, dtype=torch.uint8, device="meta")
    short = b._replace(scale=plane.as_strided((96, 6), (8, 1)))
    with recording() as specs, pytest.raises(ValueError, match="with room for whole words"):
        ops.grouped_gemm_decoded(with_room(a), short, table=table, out=out)
    with recording() as specs:
        ops.grouped_gemm_decoded(with_room(a), with_room(b), table=table, out=out)
    assert len(specs) == 1


def test_one_kernel_for_each_product():
    table = torch.empty(4, 3, dtype=torch.int32, device="meta")
    a, b = (DecodedOperand(rows, 256, "e4m3", seed=5, groups=2, device="meta").coded for rows in (64, 96))
    with recording() as specs:
        ops.grouped_gemm_decoded(a, b, table=table, out=torch.empty(64, 48, device="meta"))
        ops.grouped_wgrad_decoded(a, b, table=table, out=torch.empty(128, 96, device="meta"))
    assert [spec.template.split(",")[0] for spec in specs] == ["GemmStaged<RowGroups", "GemmStaged<DepthGroups"]
