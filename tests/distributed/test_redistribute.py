"""DTensor's redistributions of quantized tensors: the bytes of the whole, or a refusal on all ranks alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from te_dist import grouped
from te_dist.catalog import FORMATS
from te_dist.tensor import QuantizedTensor, quantize
from te_dist.testing import assert_bitwise, mesh

PLACES: dict[str, Placement] = {"whole": Replicate(), "first": Shard(0), "second": Shard(1)}
WAYS = [(a, b) for a in PLACES for b in PLACES if a != b]
# By shape, the extents that two and three ranks divide, of the first dimension and the second.
SHAPES = [(4, 256, 128), (5, 256, 128), (3, 192, 128), (1, 255, 128), (256, 128), (255, 192), (129, 256)]


def values(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


def refusals(rank: int, world: int, name: str, shape: tuple[int, ...]) -> list[tuple[str, str]]:
    """Ways that are refused; all others give the values, and the bytes, of the whole, and so do parts."""
    generator, refused = torch.Generator().manual_seed(0), []
    make = quantize if len(shape) == 2 else grouped.quantize  # noqa: PLR2004
    whole = make(torch.randn(shape, generator=generator), FORMATS[name])
    for way in WAYS:
        before, behind = (PLACES[place] for place in way)
        spread, plain = (
            distribute_tensor(each, mesh((world,), ("tp",)), [before], src_data_rank=None)
            for each in (whole.clone(), whole.dequantize())
        )
        try:
            moved: DTensor = spread.redistribute(placements=[behind])
            again = moved.full_tensor()
        except NotImplementedError:
            refused.append(way)
            continue
        assert_bitwise(values(moved.to_local()), plain.redistribute(placements=[behind]).to_local(), f"{way}")
        assert_bitwise(values(again), whole.dequantize(), f"whole of {way}")
    everyones: list[list[tuple[str, str]]] = [[]] * world
    dist.all_gather_object(everyones, refused)
    assert all(each == refused for each in everyones), f"ranks refuse otherwise: {everyones}"
    return refused


@pytest.mark.gloo_only("NCCL goes from one dimension to another by an op of its own, which quantized tensors have not")
@pytest.mark.each_value
@pytest.mark.parametrize("name", ["float8_block_2d", "float8_tensorwise", "mxfp8_1d"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_are_those_of_plain_tensors_or_refused_by_all(
    ranks, shape: tuple[int, ...], world: int, name: str
) -> None:
    found = ranks(world).run(refusals, name, shape)
    divides = {place: shape[dim] % world == 0 for dim, place in enumerate(("first", "second"))} | {"whole": True}
    wanted = []
    for way in WAYS:
        is_even = divides[way[0]] and divides[way[1]]
        if way == ("first", "second") and len(shape) == 2:  # noqa: PLR2004
            is_even = divides["second"]  # rows that are missing are there in name
        if way == ("first", "whole") or way == ("whole", "first"):
            is_even = True
        if not is_even:
            wanted.append(way)
    assert found == [wanted] * world
