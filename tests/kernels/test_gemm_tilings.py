"""Which tiling a product is given: pure functions of its shape."""

from __future__ import annotations

from itertools import product

import pytest

from te_dist.kernels import gemm, grouped_gemm


def split(tiling: gemm.Tiling) -> tuple[int, int]:
    return tiling.consumers, tiling.waves


@pytest.mark.parametrize(
    ("square", "out_bytes", "best"), [(True, 2, (2, 2)), (True, 4, (2, 2)), (False, 2, (3, 1)), (False, 4, (2, 2))]
)
def test_large_products_are_given_the_tiling_that_was_measured_fastest(square, out_bytes, best):
    assert split(gemm.tiling(8192, 8192, gemm.Kind(square, out_bytes))) == best
    assert split(grouped_gemm.rows_tiling(65536, 8192, 2, gemm.Kind(True, out_bytes))) == (2, 2)


def test_few_rows_are_given_small_tiles():
    assert gemm.tiling(128, 4096, gemm.Kind(True, 2)).rows == 128
    assert grouped_gemm.rows_tiling(128 * 64, 4096, 128, gemm.Kind(True, 2)).rows == 128  # 64 rows in each group
    assert grouped_gemm.rows_tiling(128 * 2048, 4096, 128, gemm.Kind(True, 2)).rows > 128


def test_no_processor_is_left_idle_for_larger_tiles():
    assert gemm.tiling(132 * 128, 128, gemm.Kind(True, 2)).rows == 128


def test_one_block_does_not_share_rows_with_another():
    for *shape, square, out_bytes in product((64, 4096), (64, 128), (True, False), (2, 4)):
        assert gemm.tiling(*shape, gemm.Kind(square, out_bytes)).cluster == 1


def test_what_is_added_to_fits_shared_memory():
    assert gemm.tiling(8192, 8192, gemm.Kind(False, 4, adds=True)).waves == 1


def test_every_tiling_that_is_chosen_is_one_to_choose_from():
    kinds = [gemm.Kind(square, *out) for square, out in product((True, False), ((2,), (4,), (4, True)))]
    for rows, cols, groups, kind in product((1, 700, 2**17), (8, 129, 2**13), (1, 9), kinds):
        chosen = (
            gemm.tiling(rows, cols, kind),
            grouped_gemm.rows_tiling(rows, cols, groups, kind),
            grouped_gemm.sums_tiling(rows, cols, groups, gemm.Kind(False, *kind[1:])),
        )
        assert set(chosen) <= set(gemm.tilings(cols, kind))
