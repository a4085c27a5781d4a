"""Groups of quantized matrices on CUDA: the CPU's bytes, alone, together and derived."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist import grouped
from te_dist.catalog import FORMATS
from te_dist.formats import Direction
from te_dist.grouped import GroupedTensor
from te_dist.testing import assert_bitwise

pytestmark = pytest.mark.gpu

SHAPES = [(5, 128, 256), (3, 96, 160), (2, 40, 144)]  # of whole tiles, and of ragged ones


def values(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-6, 6, (*shape[:2], 1), generator=generator).float())
    return (torch.randn(shape, generator=generator) * spread).bfloat16()


def fitting(name: str) -> list[tuple[int, int, int]]:
    return [shape for shape in SHAPES if shape[1] % FORMATS[name].alignment(0) == 0]


def assert_same(got: GroupedTensor, want: GroupedTensor, what: str) -> None:
    for field, buffer in want.storage.buffers.items():
        assert_bitwise(getattr(got, field).cpu(), buffer, f"{field}, {what}")


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_again_and_again(name):
    """One after the other at first, by launches that are prepared the second time, and by these from then on."""
    for shape in fitting(name):
        want = grouped.quantize(values(shape), FORMATS[name])
        x = values(shape).cuda()
        got = grouped.quantize(x, FORMATS[name])
        assert_same(got, want, f"{shape}, at first")
        for turn in range(3):
            new = values(shape, seed=turn + 1)
            x.copy_(new)
            got.quantize_(x)
            assert_same(got, grouped.quantize(new, FORMATS[name]), f"{shape}, turn {turn}")


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.columnwise_is_derivable])
def test_derived_directions(name):
    for shape in fitting(name):
        want = grouped.quantize(values(shape), FORMATS[name])
        got = grouped.quantize(values(shape).cuda(), FORMATS[name])
        got.update_usage(columnwise_usage=False)
        got.update_usage(columnwise_usage=True)
        assert_same(got, want, f"{shape}")
        for direction in Direction:
            operands = [group.storage.operand(direction, torch.float32) for group in (got, want)]
            assert_bitwise(operands[0].cpu(), operands[1], f"{shape} {direction.value}")


@pytest.mark.parametrize("name", FORMATS)
def test_members_of_different_shapes(name):
    matrices = [values((1, 16 * rows, 160), seed=rows)[0] for rows in (3, 8, 1)]
    want = grouped.quantize(matrices, FORMATS[name])
    assert_same(grouped.quantize([matrix.cuda() for matrix in matrices], FORMATS[name]), want, "ragged")
