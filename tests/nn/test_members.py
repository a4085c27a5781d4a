"""Matrices quantized at once have the bytes of each quantized alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dist.catalog import FORMATS
from te_dist.codecs.turned import as_rows
from te_dist.formats import Direction, Format, Region, geometry
from te_dist.nn.grouped_weights import encoded
from te_dist.nn.members import at_once
from te_dist.tensor import QuantizedStorage
from te_dist.tensor import storage as storages
from te_dist.testing import assert_bitwise
from tests.nn.recipes import CASES, quantizer

NONE = {"nvfp4_row_scaled", "nvfp4_1d_hadamard", "high_precision"}  # whose codecs do more


def normal(*shape: int) -> torch.Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, shape[0])[:, None, None]
    )


def planes_of(format: Format) -> list[Any]:
    """How the directions that are quantized lie as rows."""
    return [as_rows(format[direction]) for direction in format.independent]


def check(want: QuantizedStorage, got: dict[str, torch.Tensor]) -> None:
    """All but padding."""
    for field in want.fields:
        pair = (geometry.compact(field, buffers[field.name], want.region) for buffers in (got, want.buffers))
        assert_bitwise(*pair, field.name)


@pytest.mark.parametrize("directions", [tuple(Direction), *((d,) for d in Direction)], ids=len)
@pytest.mark.parametrize(("dtype", "cols"), [(torch.float32, 384), (torch.bfloat16, 384), (torch.bfloat16, 208)])
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_those_of_each_alone(
    name: str, dtype: torch.dtype, cols: int, directions: tuple[Direction, ...]
) -> None:
    format, whole = FORMATS[name], normal(3, 256, cols).to(dtype)
    if any(direction not in format for direction in directions):
        pytest.skip("a direction that is not there")
    format = format.select(*directions)
    found, is_turned = at_once(whole, format), any(p is not None and p[2] for p in planes_of(format))
    if found is None:
        assert name in NONE or "high_precision" in name or (is_turned and cols % 128)
        return
    for number, matrix in enumerate(whole):
        want = storages.quantize(matrix, format, region=Region.whole(*matrix.shape))
        assert found.keys() == want.buffers.keys()
        check(want, {name: buffer[number] for name, buffer in found.items()})


@pytest.mark.parametrize("shape", [(3, 192, 128), (0, 128, 128)])
def test_ragged_matrices_are_quantized_one_by_one(shape: tuple[int, int, int]) -> None:
    assert at_once(torch.zeros(shape), FORMATS["float8_block_2d"]) is None


@pytest.mark.parametrize("name", ["block", "current", "mxfp8", "mxfp8_2d", "nvfp4", "nvfp4_plain", "hybrid"])
def test_weights_are_quantized_at_once(name: str) -> None:
    found, whole = quantizer(CASES[name].recipe, "weight"), normal(2, 128, 256)
    assert found.writes_by_format and at_once(whole, found.declare(whole.dtype)) is not None
    storage = encoded(whole, found, *Direction)
    for matrix, member in zip(whole, storage.members, strict=True):
        check(storages.quantize(matrix, storage.format), member.buffers)
