"""Kernels of groups that `fsdp2.fully_shard` compiles before the first collective."""

from __future__ import annotations

import pytest
from torch import nn

from te_dist import grouped
from te_dist.formats import Group
from te_dist.fsdp2 import GroupedParameter
from te_dist.fsdp2.ahead import kernels_of
from tests.grouped.samples import FORMATS, NAMES


@pytest.mark.parametrize("rows", [128, 96])
@pytest.mark.parametrize("name", [n for n in NAMES if n != "high_precision"])
def test_what_is_quantized_decoded_and_derived_is_known_ahead(name: str, rows: int) -> None:
    format, module = FORMATS[name], nn.Module()
    storage = grouped.empty(Group.whole(4, rows, 256), format, device="meta").storage
    module.weight = nn.Parameter(GroupedParameter(storage))
    files = {spec.file for spec in kernels_of(module)}
    assert len(files) >= 2, f"to quantize and to decode: {files}"
    row, col = format.rowwise.fields[0], (format.columnwise or format.rowwise).fields[0]
    is_turned = format.columnwise_is_derivable and row.order != col.order
    assert any("transpose" in file for file in files) == is_turned, files
