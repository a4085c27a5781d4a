"""Groups of every format for tests, and what each member should be."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import grouped
from te_dist.catalog import FORMATS
from te_dist.grouped import GroupedTensor
from te_dist.tensor import QuantizedTensor, quantize
from te_dist.testing import assert_bitwise
from tests.tensor.samples import NAMES

SHAPE = (3, 96, 160)  # of a member: whole tiles of some formats, ragged ones of others
RAGGED = ((96, 160), (32, 160), (64, 160))
UNALIKE = ((96, 160), (32, 96))


def values(*shape: int, seed: int = 0) -> Tensor:
    """Positive bf16 values whose largest differs a lot between members and rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = shape[:-1].numel() if isinstance(shape[:-1], torch.Size) else torch.Size(shape[:-1]).numel()
    spread = torch.exp2(torch.randint(-3, 3, (rows, 1), generator=generator).float())
    return ((torch.rand(rows, shape[-1], generator=generator) + 0.1) * spread).view(shape).bfloat16()


def sample(name: str) -> GroupedTensor:
    """Three equal members of the format of that name."""
    return grouped.quantize(values(*SHAPE), FORMATS[name])


def assert_members(group: GroupedTensor, matrices: list[Tensor] | Tensor, what: str) -> None:
    """Each member is, byte for byte, its matrix quantized alone."""
    assert len(group.members) == len(matrices)
    for index, (member, matrix) in enumerate(zip(group.members, matrices, strict=True)):
        assert_same(member, quantize(matrix, group.format), f"{what}: member {index}")


def assert_same(got: QuantizedTensor, want: QuantizedTensor, what: str) -> None:
    assert got.shape == want.shape
    for name, buffer in got.storage.buffers.items():
        assert_bitwise(buffer, want.storage.buffers[name], f"{what}: {name}")


__all__ = ["FORMATS", "NAMES", "RAGGED", "SHAPE", "UNALIKE", "assert_members", "assert_same", "sample", "values"]
