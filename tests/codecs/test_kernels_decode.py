"""Compiled dequantizers against the oracle, bit by bit, at every SIMD level this CPU can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.codecs import reference
from te_dist.formats import WHOLE
from te_dist.ops._checks import grid_shape
from te_dist.testing import assert_bitwise
from tests.codecs.kernel_inputs import DTYPES, every_level, pack

PLACES = [((256, 384), (0, 0)), ((130, 270), (100, 90)), ((1, 515), (5, 1)), ((66, 1), (0, 7)), ((0, 8), (0, 0))]
TILES = [(WHOLE, WHOLE), (1, 128), (128, 1), (128, 128), (1, WHOLE), (32, 32)]


def random_bytes(shape: tuple[int, int]) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def random_scales(shape: tuple[int, int]) -> Tensor:
    """From subnormal to overflowing, with an infinity and a zero."""
    generator = torch.Generator().manual_seed(2)
    scale = torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator) * 30)
    scale.view(-1)[3::7] = torch.inf
    scale.view(-1)[5::7] = 0.0
    return scale


def layouts(codes: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same matrix contiguous, transposed in memory, and inside a wider one."""
    yield "mk", codes
    yield "km", codes.t().contiguous().t()
    yield "strided", torch.stack((codes, codes), -1)[..., 0]


def assert_values(got: Tensor, want: Tensor, name: str) -> None:
    """Bitwise equal but for the payload of NaN."""
    want = want.to(got.dtype)
    assert torch.equal(got.isnan(), want.isnan()), f"{name}: NaN in other places"
    assert_bitwise(got.masked_fill(got.isnan(), 0), want.masked_fill(want.isnan(), 0), name)


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("shape", "phase"), PLACES)
def test_float8(shape, phase, tile, fp8):
    phase = tuple(p % t if t else 0 for p, t in zip(phase, tile, strict=True))
    codes, scale = random_bytes(shape), random_scales(grid_shape(shape, phase, tile))
    want = reference.decode_float8(codes, scale, tile, phase, fp8)
    for layout, data in layouts(codes):
        for dtype in DTYPES:
            for level in every_level():
                out = torch.full(shape, 77, dtype=dtype)
                ops.dequantize_float8(data, scale.t().contiguous().t(), tile=tile, phase=phase, fp8=fp8, out=out)
                assert_values(out, want, f"{layout} {dtype} {level}")


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("grain", [(1, 32), (32, 1)])
@pytest.mark.parametrize(("shape", "phase"), PLACES)
def test_mxfp8(shape, phase, grain, fp8):
    phase = tuple(p % g for p, g in zip(phase, grain, strict=True))
    codes, scale = random_bytes(shape), random_bytes(grid_shape(shape, phase, grain))
    want = reference.decode_mxfp8(codes, scale, grain, phase, fp8)
    for layout, data in layouts(codes):
        for dtype in DTYPES:
            for level in every_level():
                out = torch.full(shape, 77, dtype=dtype)
                ops.dequantize_mxfp8(data, scale, grain=grain, phase=phase, fp8=fp8, out=out)
                assert_values(out, want, f"{layout} {dtype} {level}")


@pytest.mark.parametrize("e4m3_max", [448, 256])
@pytest.mark.parametrize("packed_dim", [0, 1])
@pytest.mark.parametrize(("shape", "phase"), [((256, 384), (0, 0)), ((70, 300), (6, 10)), ((2, 2), (14, 4))])
def test_nvfp4(shape, phase, packed_dim, e4m3_max):
    grain = (1, 16) if packed_dim == 1 else (16, 1)
    phase = tuple(p % g for p, g in zip(phase, grain, strict=True))
    codes, scale = random_bytes(shape) & 0xF, random_bytes(grid_shape(shape, phase, grain))
    data = pack(codes if packed_dim == 1 else codes.t())
    for amax in (torch.tensor([[3.3]]), torch.rand(shape[0], 1) * 100):
        want = reference.decode_nvfp4(codes, scale, amax, grain, phase, e4m3_max=e4m3_max)
        for dtype in DTYPES:
            for level in every_level():
                out = torch.full(shape, 77, dtype=dtype)
                layout = dict(packed_dim=packed_dim, phase=phase, e4m3_max=e4m3_max)
                ops.dequantize_nvfp4(data, scale, amax, **layout, out=out)
                assert_values(out, want, f"{dtype} amax {tuple(amax.shape)} {level}")
