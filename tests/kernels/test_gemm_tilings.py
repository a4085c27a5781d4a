"""Which tiling a product is given: pure functions of its shape."""

from __future__ import annotations

from itertools import product

import pytest

from te_dist.kernels import gemm, grouped_gemm


@pytest.mark.parametrize("kind", gemm.RATES)
def test_large_products_are_given_the_tiling_that_was_measured_fastest(kind):
    for tiling, rates in (
        (gemm.tiling(2**16, 2**14, kind), gemm.RATES[kind]),
        (grouped_gemm.rows_tiling(2**18, 2**14, 2, kind), grouped_gemm.ROWS_RATES[kind]),
        (grouped_gemm.sums_tiling(2**14, 2**14, 2, kind), gemm.RATES[kind]),
    ):
        assert rates[tiling] > 0.99 * max(rates.values())


def test_few_rows_are_given_small_tiles():
    assert gemm.tiling(128, 4096, gemm.Kind(True, 2)).rows == 128
    assert grouped_gemm.rows_tiling(128 * 64, 4096, 128, gemm.Kind(True, 2)).rows == 128  # 64 rows in each group
    assert grouped_gemm.rows_tiling(128 * 2048, 4096, 128, gemm.Kind(False, 4)).rows > 128


def test_no_processor_is_left_idle_for_larger_tiles():
    assert gemm.tiling(132 * 128, 128, gemm.Kind(True, 2)).rows == 128


def test_one_block_does_not_share_rows_with_another():
    for *shape, square, out_bytes in product((64, 4096), (64, 128), (True, False), (2, 4)):
        assert gemm.tiling(*shape, gemm.Kind(square, out_bytes)).cluster == 1


def test_every_tiling_that_is_chosen_is_one_to_choose_from():
    for rows, cols, groups, kind in product((1, 700, 2**17), (8, 129, 2**13), (1, 9), gemm.RATES):
        chosen = (
            gemm.tiling(rows, cols, kind),
            grouped_gemm.rows_tiling(rows, cols, groups, kind),
            grouped_gemm.sums_tiling(rows, cols, groups, kind),
        )
        assert set(chosen) <= {*gemm.RATES[kind], *grouped_gemm.ROWS_RATES[kind]}
