"""Products of FP8 blocks, simulated, against the same in float64: what a GPU is asked in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from te_dist import kernels, ops
from te_dist.kernels import gemm, grouped_gemm
from te_dist.kernels.gemm import Tiling
from te_dist.testing import assert_bitwise
from tests.ops.groups import RUN, SQUARE, Operand, check_product, table_of

FP8 = ("e4m3", "e4m3")
EIGHT_STAGES = 8 * gemm.DEPTH  # which the kernel multiplies in a row


pytestmark = pytest.mark.usefixtures("simulated")


def choose(monkeypatch: pytest.MonkeyPatch, tiling: Tiling) -> None:
    monkeypatch.setattr(gemm, "tiling", lambda *_: tiling)
    for name in ("rows_tiling", "sums_tiling"):
        monkeypatch.setattr(grouped_gemm, name, lambda *_: tiling)


@pytest.mark.parametrize("are_sizes", (False, True))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_table_of_groups(dtype, are_sizes):
    sizes = [0, 5, 0, 300, 1, 64, 0] + [-3, 1, 0] * are_sizes + [0] * 600
    table = torch.full((4, len(sizes) + 1), -1, dtype=torch.int32)
    given = torch.tensor(sizes)
    ops.group_table((given if are_sizes else given.cumsum(0)).to(dtype), rows=400, out=table, are_sizes=are_sizes)
    sizes = [max(0, size) for size in sizes]
    for row, height in zip(table.tolist(), (1, *grouped_gemm.HEIGHTS), strict=True):
        assert row == [sum(-(-size // height) for size in sizes[:group]) for group in range(len(sizes) + 1)]


@pytest.mark.parametrize(
    ("tiling", "tile", "dtype", "depth"),
    [
        (Tiling(2, 2, 2, band=3), SQUARE, torch.bfloat16, 272),
        (Tiling(2, 2, 2, band=3), SQUARE, torch.bfloat16, EIGHT_STAGES + 144),
        (Tiling(2, 1, cols=192, band=3), SQUARE, torch.bfloat16, 272),
        (Tiling(3, 1, band=3), RUN, torch.float32, 272),
    ],
    ids=str,
)
def test_product_of_each_group(tiling, tile, dtype, depth, monkeypatch):
    choose(monkeypatch, tiling)
    sizes = [0, 5, 0, 300, 1, 64, 0]
    rows, cols, groups = sum(sizes) + 9, 200, len(sizes)
    a, b = Operand(rows, depth, RUN, seed=1), Operand(cols, depth, tile, groups=groups, seed=2)
    bias, factor = torch.randn(groups, cols), torch.rand(rows)
    out = torch.full((rows, cols), 5.0, dtype=dtype)
    place = (table_of(sizes, rows), 1, tile, FP8, bias, factor, False, out)
    kernels.grouped_gemm_float8_block(a.codes, a.scale, b.codes, b.scale, *place)
    begin = 0
    for group, size in enumerate(sizes):
        its, matrix = slice(begin, begin + size), b.values[group * cols : (group + 1) * cols]
        want = (a.values[its] @ matrix.t() + bias[group]) * factor[its, None]
        check_product(out[its], want, a.values[its].abs() @ matrix.abs().t() + bias[group].abs(), f"group {group}")
        begin += size
    assert (out[begin:] == 5).all()


@pytest.mark.parametrize(
    ("tiling", "depth"),
    [(Tiling(2, 1, band=3), 256), (Tiling(2, 2, 2, band=3), 256), (Tiling(2, 2, band=3), EIGHT_STAGES + 128)],
    ids=str,
)
def test_a_matrix_that_lies_the_other_way_gives_the_same_bits(tiling, depth, monkeypatch):
    choose(monkeypatch, tiling)
    sizes = [0, 5, 0, 300, 1, 64, 0]
    rows, cols = sum(sizes) + 9, 208
    a, b = Operand(rows, depth, RUN, seed=1), Operand(cols, depth, SQUARE, groups=len(sizes), seed=2)
    want, got = (torch.full((rows, cols), 5.0, dtype=torch.bfloat16) for _ in range(2))
    for out, summed_dim, operand in ((want, 1, (b.codes, b.scale)), (got, 0, b.turned())):
        place = (table_of(sizes, rows), summed_dim, SQUARE, FP8, None, None, False, out)
        kernels.grouped_gemm_float8_block(a.codes, a.scale, *operand, *place)
    assert_bitwise(got, want, "products")


@pytest.mark.parametrize("tiling", [Tiling(2, 1, band=3), Tiling(3, 1, band=3), Tiling(2, 2, 2, band=3)], ids=str)
def test_product_that_is_added(tiling, monkeypatch):
    choose(monkeypatch, tiling)
    depth = EIGHT_STAGES + 144
    a, b = Operand(300, depth, RUN, seed=5), Operand(200, depth, SQUARE, seed=6)
    out = torch.full((300, 200), 2.0)
    kernels.gemm_float8_block(a.codes, a.scale, b.codes, b.scale, SQUARE, (0, 0), FP8, 1, None, True, out)
    check_product(out, a.values @ b.values.t() + 2, a.values.abs() @ b.values.abs().t() + 2, "a product")


@pytest.mark.parametrize(
    ("tiling", "adds"),
    [(Tiling(3, 1, band=3), True), (Tiling(2, 2, 2, band=3), False), (Tiling(2, 1, cols=192, band=3), False)],
    ids=str,
)
def test_a_part_that_begins_inside_of_tiles_has_the_bits_of_the_whole(tiling, adds, monkeypatch):
    choose(monkeypatch, tiling)
    (col, depth), rows, cols = (80, 112), 300, 400
    a, b = Operand(rows, 272, RUN, seed=7), Operand(cols, 272, SQUARE, seed=8)
    a.codes[:, :depth] = 0  # which the part does not have
    bias = torch.randn(cols)
    want, got = (torch.full((rows, cols), 2.0, dtype=torch.float32 if adds else torch.bfloat16) for _ in range(2))
    kernels.gemm_float8_block(a.codes, a.scale, b.codes, b.scale, SQUARE, (0, 0), FP8, 1, bias, adds, want)
    left, right = (codes[:, depth:].contiguous() for codes in (a.codes, b.codes[col:]))
    place = SQUARE, (col, depth), FP8, 1, bias[col:].contiguous(), adds, got[:, col:]
    kernels.gemm_float8_block(left, a.scale, right, b.scale, *place)
    want[:, :col] = 2.0
    assert_bitwise(got, want, "products")


@pytest.mark.parametrize("tile", (SQUARE, RUN), ids=str)
@pytest.mark.parametrize("parts", (2, 3, 5))
def test_parts_of_a_sum_are_products_of_their_own(parts, tile, monkeypatch):
    choose(monkeypatch, Tiling(2, 1, band=3))
    rows, cols, depth = 130, 144, 13 * gemm.DEPTH + 16
    a, b = Operand(rows, depth, RUN, seed=9), Operand(cols, depth, tile, seed=10)
    out = torch.full((parts * rows, cols), torch.nan)
    kernels.gemm_float8_block(a.codes, a.scale, b.codes, b.scale, tile, (0, 0), FP8, parts, None, False, out)
    length = gemm.DEPTH * gemm.part_tiles(14, parts)
    for part, got in enumerate(out.chunk(parts)):
        left, right = (side.values[:, part * length : (part + 1) * length] for side in (a, b))
        check_product(got, left @ right.t(), left.abs() @ right.abs().t(), f"part {part}")


@pytest.mark.parametrize("cols", (576, 200))
def test_tiles_that_follow_each_other_wait_for_their_boxes(cols, monkeypatch):
    """Sums so short that what is written is still being read when the next tile is."""
    choose(monkeypatch, Tiling(2, 1, cols=192, band=3))
    a, b = Operand(300, 128, RUN, seed=3), Operand(cols, 128, SQUARE, seed=4)
    out = torch.full((300, cols), torch.nan)
    kernels.gemm_float8_block(a.codes, a.scale, b.codes, b.scale, SQUARE, (0, 0), FP8, 1, None, False, out)
    check_product(out, a.values @ b.values.t(), a.values.abs() @ b.values.abs().t(), "a product")


@pytest.mark.parametrize(
    ("tiling", "adds"),
    [
        (Tiling(3, 1, 2, band=3), True),
        (Tiling(2, 2, band=3), False),
        (Tiling(2, 2, 2, band=3), False),
        pytest.param(Tiling(3, 1, 2, band=3), False, marks=pytest.mark.exhaustive),
        pytest.param(Tiling(2, 2, 2, band=3), True, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_sum_over_the_rows_of_each_group(tiling, adds, monkeypatch):
    choose(monkeypatch, tiling)
    check_sums(rows=300, cols=264, sizes=[0, 5, 0, 600, 128, 0], adds=adds)


def test_sums_in_a_ring_of_two_stages(monkeypatch):
    """The next stage is read as soon as the one before it may be filled again."""
    choose(monkeypatch, Tiling(2, 2, band=3))
    monkeypatch.setattr(Tiling, "stages", lambda *_, **__: 2)
    monkeypatch.setattr(grouped_gemm, "sums_float8_block", grouped_gemm.sums_float8_block.__wrapped__)
    check_sums(rows=300, cols=130, sizes=[600, 128], adds=False)


def check_sums(*, rows: int, cols: int, sizes: list[int], adds: bool) -> None:
    groups = len(sizes)
    depth = 128 * (sum(-(-size // 128) for size in sizes) + 1)
    a, b = (Operand(extent, depth, RUN, seed=extent) for extent in (rows, cols))
    before = 2.0 if adds else 0.0
    out = torch.full((groups * rows, cols), 2.0 if adds else torch.nan)
    kernels.grouped_wgrad_float8_block(a.codes, a.scale, b.codes, b.scale, table_of(sizes, sum(sizes)), FP8, adds, out)
    begin = 0
    for group, (size, got) in enumerate(zip(sizes, out.chunk(groups), strict=True)):
        end = begin + -(-size // 128) * 128
        left, right = a.values[:, begin:end], b.values[:, begin:end]
        check_product(got, left @ right.t() + before, left.abs() @ right.abs().t() + before, f"group {group}")
        begin = end
