"""Groups as they should not be: none, more rows than the matrix has, ends that decrease."""

from __future__ import annotations

import copy

import pytest
import torch

from te_dist import ops
from te_dist.ops.group_table import padded_rows
from tests.ops.foreign_tables import check_foreign, foreign_calls
from tests.ops.groups import RUN, SQUARE, Operand, table_of
from tests.ops.no_groups import NoGroups


def test_no_groups():
    NoGroups("cpu").check()


def test_a_table_of_more_rows_than_there_are_ends_with_the_matrix():
    for call in foreign_calls():
        want = copy.deepcopy(call)
        want.run()
        check_foreign(call, want)


def test_ends_that_decrease_end_where_the_largest_before_them_does():
    table = torch.full((4, 8), -1, dtype=torch.int32)
    ops.group_table(torch.tensor([10, 3, -5, 140, 139, 900, 200]), rows=300, out=table)
    assert table[0].tolist() == [0, 10, 10, 10, 140, 140, 300, 300]
    assert table[1].tolist() == [0, 1, 1, 1, 3, 3, 5, 5]
    assert 128 * int(table[1, -1]) <= padded_rows(300, 7)


@pytest.mark.parametrize("rows", (-5, 2**31))
def test_a_number_of_rows_that_no_table_holds_is_refused(rows):
    with pytest.raises(ValueError, match=f"rows: got {rows}, wanted 0 to 2147483647"):
        ops.group_table(torch.tensor([1]), rows=rows, out=torch.zeros(4, 2, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(4,), (4, 0), (3, 3)])
def test_what_is_no_table_is_refused(shape):
    with pytest.raises(ValueError, match="table: got shape"):
        ops.clear_rest(torch.zeros(4, 4), table=torch.zeros(shape, dtype=torch.int32))


@pytest.mark.parametrize("spare", (-1, 1, 2))
@pytest.mark.parametrize("tile", (SQUARE, RUN))
def test_scales_of_members_have_no_other_rows(tile, spare):
    a, b = Operand(64, 256, RUN, seed=5), Operand(256, 256, tile, groups=2, seed=6)
    scale = torch.ones(b.scale.shape[0] + spare, b.scale.shape[1])
    rest = dict(table=table_of([30, 30], 64), b_tile=tile, fp8=("e4m3", "e4m3"), bias=None, row_factor=None)
    rest |= dict(summed_dim=1)
    with pytest.raises(ValueError, match="b_scale: got "):
        ops.grouped_gemm_float8_block(
            a.codes, a.scale, b.codes, scale, out=torch.zeros(64, 256), accumulate=False, **rest
        )
