"""The chunks that a rank keeps, of those that FSDP2 cuts for all: the bytes and the cut of plain `torch.chunk`."""

from __future__ import annotations

import pytest
import torch

from te_dist import grouped
from te_dist.catalog import FORMATS
from te_dist.fsdp2.ahead import Shards
from te_dist.fsdp2.own_chunk import OwnChunk
from te_dist.tensor import QuantizedTensor
from tests.tensor.samples import NAMES, assert_same_bytes, sample, values


def group(name: str) -> QuantizedTensor:
    return grouped.quantize(values(5, 64, 64), FORMATS[name])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 16])
@pytest.mark.parametrize(
    ("make", "dim"), [(sample, 0), (group, 0), (group, 1)], ids=["rows", "members", "rows of each"]
)
@pytest.mark.parametrize("name", NAMES)
def test_the_first_chunk_and_that_of_the_rank_are_made(name: str, make, dim: int, count: int) -> None:
    whole = make(name)
    want = torch.chunk(make(name), count, dim)
    for index in range(count):
        with OwnChunk({id(whole): Shards(count, index)}):
            got = torch.chunk(whole, count, dim=dim)
            beside = torch.chunk(input=torch.arange(6), chunks=count)
        assert len(got) == count
        assert [part.shape for part in got[: len(want)]] == [part.shape for part in want]
        assert not any(part.numel() for part in got[len(want) :])
        assert all(torch.equal(a, b) for a, b in zip(beside, torch.arange(6).chunk(count), strict=True))
        for number, (a, b) in enumerate(zip(got, want, strict=False)):
            if number in (0, index):
                assert_same_bytes(a, b, f"chunk {number}")
                assert (a.storage.cut, a.storage.place) == (b.storage.cut, b.storage.place)
            else:
                assert a.device.type == "meta"
                assert type(a) is torch.Tensor
