"""Quantized tensors of every format for tests, with values that all ops are defined on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist.catalog import FORMATS
from te_dist.tensor import QuantizedTensor, quantize
from te_dist.testing import assert_bitwise

SHAPE = (96, 160)  # whole tiles of some formats, ragged ones of others
NAMES = tuple(FORMATS)
# One of each family, as recipes keep weights, and one that is transformed: for what every format has in common.
FAMILIES = (
    "float8_tensorwise_tn",
    "float8_block_2d",
    "mxfp8_1d",
    "nvfp4_2d",
    "hybrid_mxfp8_nvfp4",
    "nvfp4_1d_hadamard",
)
of_each_family = pytest.mark.every_run(name=FAMILIES)


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Positive values of magnitude 0.1 to 2: logarithms and roots are defined."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape or SHAPE, generator=generator) * 1.9 + 0.1).to(dtype)


def signed(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal values."""
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sample(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> QuantizedTensor:
    """A tensor of the format of that name."""
    return quantize(values(*shape, dtype=dtype), FORMATS[name])


def assert_same_bytes(got: QuantizedTensor, want: QuantizedTensor, what: str) -> None:
    """Asserts that both have the same buffers, byte for byte."""
    assert list(got.storage.buffers) == list(want.storage.buffers), what
    for name, buffer in got.storage.buffers.items():
        assert_bitwise(buffer, want.storage.buffers[name], f"{what}: {name}")
