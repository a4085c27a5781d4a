"""CUDA dequantizers, transposes, transforms and copies against the CPU's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.formats import WHOLE
from te_dist.ops._checks import grid_shape
from te_dist.testing import assert_bitwise
from tests.codecs.kernel_inputs import DTYPES, KINDS, matrix
from tests.gpu.twins import check_twins, on_gpu

pytestmark = pytest.mark.gpu

PLACES = [((256, 384), (0, 0)), ((130, 270), (100, 90)), ((1, 515), (5, 1)), ((66, 1), (0, 7)), ((0, 8), (0, 0))]


def random_bytes(shape: tuple[int, int]) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def random_scales(shape: tuple[int, int]) -> Tensor:
    """From subnormal to overflowing, with an infinity and a zero."""
    generator = torch.Generator().manual_seed(2)
    scale = torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator) * 30)
    scale.view(-1)[3::7] = torch.inf
    scale.view(-1)[5::7] = 0.0
    return scale


def layouts(codes: Tensor) -> list[tuple[str, Tensor]]:
    """The same matrix contiguous, transposed in memory, inside a wider one, and with gaps."""
    wider = torch.zeros(codes.shape[0], codes.shape[1] + 16, dtype=codes.dtype)
    wider[:, : codes.shape[1]] = codes
    return [
        ("mk", codes),
        ("km", codes.t().contiguous().t()),
        ("padded", wider[:, : codes.shape[1]]),
        ("gaps", torch.stack((codes, codes), -1)[..., 0]),
    ]


def check_values(op, name: str, out: Tensor, *operands: Tensor, **options) -> None:
    """Bitwise equal but for the payload of NaN."""
    op(*operands, **options, out=out)
    got = on_gpu(out).fill_(77)
    op(*map(on_gpu, operands), **options, out=got)
    got = got.cpu()
    assert torch.equal(got.isnan(), out.isnan()), f"{name}: NaN in other places"
    assert_bitwise(got.masked_fill(got.isnan(), 0), out.masked_fill(out.isnan(), 0), name)


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("tile", [(WHOLE, WHOLE), (1, 128), (128, 1), (128, 128), (1, WHOLE), (32, 32)])
@pytest.mark.parametrize(("shape", "phase"), PLACES)
def test_dequantize_float8(shape, phase, tile, fp8):
    phase = tuple(p % t if t else 0 for p, t in zip(phase, tile, strict=True))
    scale = random_scales(grid_shape(shape, phase, tile)).t().contiguous().t()
    for layout, data in layouts(random_bytes(shape)):
        for dtype in DTYPES:
            out = torch.empty(shape, dtype=dtype)
            name = f"{layout} {dtype}"
            check_values(ops.dequantize_float8, name, out, data, scale, tile=tile, phase=phase, fp8=fp8)


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("grain", [(1, 32), (32, 1)])
@pytest.mark.parametrize(("shape", "phase"), PLACES)
def test_dequantize_mxfp8(shape, phase, grain, fp8):
    phase = tuple(p % g for p, g in zip(phase, grain, strict=True))
    scale = random_bytes(grid_shape(shape, phase, grain))
    for layout, data in layouts(random_bytes(shape)):
        for dtype in DTYPES:
            out = torch.empty(shape, dtype=dtype)
            name = f"{layout} {dtype}"
            check_values(ops.dequantize_mxfp8, name, out, data, scale, grain=grain, phase=phase, fp8=fp8)


@pytest.mark.parametrize("e4m3_max", [448, 256])
@pytest.mark.parametrize("packed_dim", [0, 1])
@pytest.mark.parametrize(("shape", "phase"), [((256, 384), (0, 0)), ((70, 300), (6, 10)), ((2, 2), (14, 4))])
def test_dequantize_nvfp4(shape, phase, packed_dim, e4m3_max):
    grain = (1, 16) if packed_dim == 1 else (16, 1)
    phase = tuple(p % g for p, g in zip(phase, grain, strict=True))
    rows, cols = shape
    data = random_bytes((rows, cols // 2) if packed_dim == 1 else (cols, rows // 2))
    scale = random_bytes(grid_shape(shape, phase, grain))
    layout = dict(packed_dim=packed_dim, phase=phase, e4m3_max=e4m3_max)
    for amax in (torch.tensor([[3.3]]), torch.rand(rows, 1) * 100):
        for dtype in DTYPES:
            out = torch.empty(shape, dtype=dtype)
            check_values(ops.dequantize_nvfp4, f"{dtype} {tuple(amax.shape)}", out, data, scale, amax, **layout)


@pytest.mark.parametrize("sign_mask", [0, 0xD7E8, 0xFFFF])
@pytest.mark.parametrize("shape", [(16, 1), (64, 100), (0, 5), (256, 64), (32, 3)])
def test_hadamard(shape, sign_mask):
    for kind in KINDS:
        x = matrix(kind, shape, torch.bfloat16)
        check_values(ops.hadamard, kind, torch.empty_like(x), x, sign_mask=sign_mask)


@pytest.mark.parametrize("shape", [(256, 512), (130, 70), (2, 2), (1, 300), (300, 1), (0, 4), (1000, 1030)])
@pytest.mark.parametrize(
    ("bits", "dtype"), [(4, torch.uint8), (8, torch.uint8), (16, torch.bfloat16), (32, torch.float32)]
)
def test_transpose(bits, dtype, shape):
    rows, cols = shape
    rows += rows % 2 if bits == 4 else 0
    src = random_bytes((rows, cols * dtype.itemsize)).view(dtype)
    out = torch.empty((2 * cols, rows // 2) if bits == 4 else (cols, rows), dtype=dtype)
    check_twins(ops.transpose, {"out": out.view(dtype)}, f"{bits} bits of {shape}", src=src, bits=bits)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "cols"), [([64, 64, 64], [512]), ([5, 0, 9], [3, 7, 1]), ([1] * 60, [48])])
def test_assemble(rows, cols, dtype):
    wires, row_starts, col_starts = [], [], []
    for i, height in enumerate(rows):
        for j, width in enumerate(cols):
            wires.append(random_bytes((height, (width + j) * dtype.itemsize)).view(dtype)[:, :width])
            row_starts.append(sum(rows[:i]))
            col_starts.append(sum(cols[:j]))
    out = torch.full((sum(rows) + 1, sum(cols) + 2), 77, dtype=dtype)
    got = on_gpu(out)
    ops.assemble(wires, row_starts=row_starts, col_starts=col_starts, out=out)
    ops.assemble([on_gpu(wire) for wire in wires], row_starts=row_starts, col_starts=col_starts, out=got)
    assert_bitwise(got.cpu().view(torch.uint8), out.view(torch.uint8), "assembled")
