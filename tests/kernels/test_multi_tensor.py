"""What is recorded for many tensors fits the kernels that it is for: no GPU is needed to say so."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from te_dist.catalog import FORMATS
from te_dist.formats import Direction, Partition, Region
from te_dist.kernels.multi_tensor import Work, kinds, multi_tensor
from te_dist.kernels.runtime import recording
from te_dist.scaling.agreement import PartsQuantization
from te_dist.tensor import empty

SHAPES = [(96, 160), (256, 512), (130, 70), (512, 1024)]
TRANSFORMED = "nvfp4_1d_hadamard"  # quantized part by part


def quantization(name: str) -> PartsQuantization:
    regions = [Region.whole(*shape) for shape in SHAPES]
    parts = []
    for region in regions:
        storage = empty(FORMATS[name], region, dtype=torch.bfloat16, device="cpu")
        parts.append((storage, torch.randn(region.shape), Partition.of([region])))
    return PartsQuantization(parts, (), noop=torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != TRANSFORMED])
def test_parameters_of_recorded_calls_are_those_of_their_kernels(name):
    prepared = quantization(name)
    calls = [*prepared.readers, *prepared.calls]
    assert all(call is not None for call in calls)
    tasks = [call.task() for call in calls]
    works = [
        Work(partial(t.kernel, t.x.source), t.widths, t.narrowest, t.blocks, (*t.x.values, *t.values)) for t in tasks
    ]
    for each, own in kinds(works).items():
        assert multi_tensor(each).each is each
        for work in own:
            assert len(each.layout.pack(*work.values)) % 8 == 0


def test_a_kind_is_launched_twice_at_most():
    def kernel(widths):
        return f"kernel at {widths}"

    works = [Work(kernel, (width, 1), (1, 1), blocks, ()) for width, blocks in ((16, 5), (8, 3), (4, 1), (16, 1))]
    found = kinds(works)
    assert list(found) == ["kernel at (16, 1)", "kernel at (1, 1)"]
    assert [len(own) for own in found.values()] == [2, 2]


@pytest.mark.parametrize("name", ["float8_block_2d", "float8_tensorwise", "mxfp8_2d", "nvfp4_2d"])
@pytest.mark.parametrize("rows", [24, 5, 4, 1])
def test_rows_without_columnwise_codes_may_be_any_number(name, rows):
    """Shards over many ranks: the widest accesses, of one kernel for all of them."""
    format = FORMATS[name].select(Direction.ROWWISE)
    whole = Region.whole(256, 512)

    def kernels_of(region):
        shard = empty(format, region, dtype=torch.bfloat16, device="meta")
        with recording() as specs:
            shard.quantize_(torch.empty(shard.shape, device="meta"))
        return [spec.template for spec in specs if "Quantize" in spec.template]

    assert kernels_of(whole.narrow(0, rows, rows)) == kernels_of(whole) != []
