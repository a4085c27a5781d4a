"""The buffer protocol of storages: what row shards give out makes the whole again, for every format."""

from __future__ import annotations

import pytest

from te_dist.catalog import FORMATS
from te_dist.tensor import storage as storages
from te_dist.testing import assert_bitwise
from tests.distributed.probe import random_matrix, wires

ROWS, COLS = 352, 160  # cut at 176: through tiles of 128 and of 32


@pytest.mark.parametrize("name", FORMATS)
def test_extracted_buffers_of_row_shards_make_the_whole(name: str) -> None:
    whole = storages.quantize(random_matrix(ROWS, COLS, 0), FORMATS[name])
    shards = [whole.narrow(0, start, ROWS // 2) for start in (0, ROWS // 2)]
    extracted = [shard.fsdp_extract_buffers() for shard in shards]
    target = storages.quantize(random_matrix(ROWS, COLS, 1), FORMATS[name])
    for field in target.fields:  # what is equal on all shards does not travel
        if field.is_shared(0):
            target.buffers[field.name].copy_(shards[0].buffers.get(field.name, whole.buffers[field.name]))
    target.fsdp_assign_gathered([buffers for buffers, _ in extracted], [region for _, region in extracted])
    for field, want in wires(whole).items():
        assert_bitwise(wires(target)[field], want, field)
    assert [len(buffers) for buffers, _ in extracted] == [len(whole.fsdp_buffer_fields())] * 2
