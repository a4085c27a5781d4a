"""Which tiling a product is given: pure functions of its shape."""

from __future__ import annotations

from itertools import product

import pytest

from benchmarks.grouped_cases import SHAPES
from te_dist.kernels import gemm, grouped_gemm


@pytest.mark.parametrize("kind", gemm.RATES)
def test_large_products_are_given_the_tiling_that_was_measured_fastest(kind):
    chosen = [
        (gemm.tiling(2**16, 2**14, 64, kind), gemm.RATES[kind]),
        (grouped_gemm.rows_tiling(2**18, 2**14, 2, 64, kind), grouped_gemm.ROWS_RATES[kind]),
    ]
    if not kind.square:
        chosen.append((grouped_gemm.sums_tiling(2**14, 2**14, 2, 128, kind), grouped_gemm.SUMS_RATES[kind]))
    for tiling, rates in chosen:
        assert rates[tiling] > 0.99 * max(rates.values())


@pytest.mark.parametrize("leg", ["fprop", "dgrad"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_in_groups_are_given_the_tiling_that_was_measured_fastest(shape, leg):
    groups, rows, *cols_depth = shape
    cols, depth = cols_depth if leg == "fprop" else reversed(cols_depth)
    chosen = grouped_gemm.rows_tiling(rows, cols, groups, -(-depth // gemm.DEPTH), gemm.Kind(True, 2))
    assert chosen == (gemm.Tiling(2, 1, cols=192) if groups == 128 else gemm.Tiling(3, 1, 2))


def test_few_rows_of_a_group_multiply_matrices_as_they_lie():
    assert [grouped_gemm.is_turned_sooner(rows, groups) for groups, rows, *_ in SHAPES] == [
        groups >= 32 for groups, *_ in SHAPES
    ]


def test_few_rows_are_given_small_tiles():
    assert gemm.tiling(128, 4096, 8, gemm.Kind(True, 2)).rows == 128
    assert grouped_gemm.rows_tiling(128 * 64, 4096, 128, 8, gemm.Kind(True, 2)).rows == 128  # 64 rows in each group
    assert grouped_gemm.rows_tiling(128 * 2048, 4096, 128, 8, gemm.Kind(False, 4)).rows > 128


def test_no_processor_is_left_idle_for_larger_tiles():
    assert gemm.tiling(132 * 128, 128, 8, gemm.Kind(True, 2)).rows == 128


def test_one_block_does_not_share_rows_with_another():
    for *shape, square, out_bytes in product((64, 4096), (64, 128), (True, False), (2, 4)):
        assert gemm.tiling(*shape, 8, gemm.Kind(square, out_bytes)).cluster == 1


def test_short_sums_are_added_in_shared_memory():
    kind = gemm.Kind(False, 4, adds=True)
    assert gemm.tiling(8192, 8192, 64, kind).waves == 2
    assert grouped_gemm.sums_tiling(1536, 2048, 128, 512, kind).waves == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_in_groups_are_given_the_tiling_that_was_measured_fastest(shape):
    groups, tokens, rows, cols = shape
    chosen = grouped_gemm.sums_tiling(rows, cols, groups, tokens // gemm.DEPTH, gemm.Kind(False, 2))
    assert chosen == (gemm.Tiling(3, 1, 2) if (groups, rows) == (128, 1536) else gemm.Tiling(2, 2, 2))


def test_every_tiling_that_is_chosen_is_one_to_choose_from():
    for rows, cols, groups, kind in product((1, 700, 2**17), (8, 129, 2**13), (1, 9), gemm.RATES):
        assert gemm.tiling(rows, cols, 8, kind) in gemm.RATES[kind]
        assert grouped_gemm.rows_tiling(rows, cols, groups, 8, kind) in grouped_gemm.ROWS_RATES[kind]
        if not kind.square:
            assert grouped_gemm.sums_tiling(rows, cols, groups, 8, kind) in grouped_gemm.SUMS_RATES[kind]


def test_clusters_that_a_last_round_would_leave_without_a_tile_are_left_out() -> None:
    assert [gemm.evenly(tiles, 66) for tiles in (512, 896, 1024)] == [64, 64, 64]
    assert [gemm.evenly(tiles, 66) for tiles in (1, 66, 67, 528)] == [1, 66, 66, 66]  # many are kept
    for tiles in range(1, 400):
        clusters = gemm.evenly(tiles, 66)
        assert 0 < clusters <= min(tiles, 66)
        assert -(-tiles // clusters) == -(-tiles // 66)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((512, 512, 65536), 16),
        ((1024, 1024, 65536), 4),
        ((512, 512, 4096), 8),
        ((512, 512, 2048), 1),  # too little to gain
        ((2048, 1024, 65536), 1),  # a tile for nearly every processor
        ((8192, 8192, 8192), 1),
    ],
)
@pytest.mark.parametrize("kind", [gemm.Kind(False, 2), gemm.Kind(False, 4, True)])
def test_sums_are_cut_where_processors_have_no_tile(shape, parts, kind):
    rows, cols, depth = shape
    assert gemm.parts_of(rows, cols, depth // gemm.DEPTH, kind) == parts


@pytest.mark.parametrize("parts", range(1, 17))
@pytest.mark.parametrize("depth_tiles", [32, 33, 100, 512])
def test_parts_have_all_of_a_sum(depth_tiles, parts):
    length = gemm.part_tiles(depth_tiles, parts)
    assert length * parts >= depth_tiles
    assert parts == 1 or length % 4 == 0
