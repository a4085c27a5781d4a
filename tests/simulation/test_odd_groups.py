"""Groups as they should not be, simulated: see tests/ops/test_odd_groups.py."""

from __future__ import annotations

import copy

import pytest
import torch

from te_dist import ops
from tests.ops.foreign_tables import check_foreign, foreign_calls
from tests.ops.no_groups import NoGroups


@pytest.mark.parametrize("call", foreign_calls(), ids=lambda call: call.op.__name__)
def test_nothing_is_written_behind_an_output(call, request):
    want = copy.deepcopy(call)
    want.run()
    request.getfixturevalue("simulated")
    check_foreign(call, want)


@pytest.mark.usefixtures("simulated")
def test_no_groups():
    NoGroups("cpu").check()


def test_ends_that_decrease_make_the_table_of_the_cpu(request):
    ends = torch.randint(-20, 400, (700,), generator=torch.Generator().manual_seed(0))
    tables = [torch.full((4, 701), -1, dtype=torch.int32) for _ in range(2)]
    ops.group_table(ends, rows=380, out=tables[0])
    request.getfixturevalue("simulated")
    ops.group_table(ends, rows=380, out=tables[1])
    assert torch.equal(*tables)
