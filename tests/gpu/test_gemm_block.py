"""Products of FP8 blocks against the product of their values in float64."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.kernels import gemm
from te_dist.testing import assert_bitwise
from tests.ops.groups import FP8, ROUNDING, RUN, SQUARE, Operand, check_product

pytestmark = pytest.mark.gpu

REPEATS = 2000

TILINGS = [gemm.Tiling(*split, cluster, band=3) for split, cluster in product([(2, 1), (2, 2), (3, 1)], (1, 2))]
WIDE = [gemm.Tiling(2, 1, cluster, cols=192, band=3) for cluster in (1, 2)]
CASES = [*product((SQUARE, RUN), TILINGS), *product((SQUARE,), WIDE)]
# (M, N, K): one tile, several, ragged in every dimension, fewer rows or columns than a tile, the shortest sum.
SHAPES = [
    (256, 256, 256),
    (1200, 650, 1536),
    (300, 208, 176),
    (129, 131, 144),
    (1, 1, 16),
    (7, 1000, 4096),
    (513, 9, 128),
]


def operand(rows: int, depth: int, fp8: str, tile: tuple[int, int], seed: int) -> Operand:
    return Operand(rows, depth, tile, fp8=fp8, seed=seed, device="cuda")


def multiply(a: Operand, b: Operand, out: Tensor, *, bias: Tensor | None = None, accumulate: bool = False) -> None:
    product = dict(b_tile=b.tile, phase=(0, 0), parts=1, fp8=(a.fp8, b.fp8), bias=bias, accumulate=accumulate)
    ops.gemm_float8_block(a.codes, a.scale, b.codes, b.scale, out=out, **product)


def check(out: Tensor, a: Operand, b: Operand, added: Tensor | float = 0.0) -> None:
    want = a.values @ b.values.t() + added
    size = a.values.abs() @ b.values.abs().t() + torch.as_tensor(added).abs()
    check_product(out, want, size, "a product")


@pytest.fixture(params=TILINGS, ids=str)
def tiling(request, monkeypatch):
    monkeypatch.setattr(gemm, "tiling", lambda *_: request.param)
    return request.param


@pytest.mark.parametrize(("b_tile", "tiling"), CASES, ids=str, indirect=["tiling"])
@pytest.mark.parametrize("shape", SHAPES)
def test_product_is_that_of_the_values(shape, b_tile, tiling):
    rows, cols, depth = shape
    a, b = operand(rows, depth, "e4m3", RUN, 1), operand(cols, depth, "e4m3", b_tile, 2)
    for dtype in ROUNDING:
        out = torch.full((rows, cols), torch.nan, device="cuda", dtype=dtype)
        multiply(a, b, out)
        check(out, a, b)


@pytest.mark.parametrize("b_tile", (SQUARE, RUN))
@pytest.mark.parametrize("fp8", list(product(FP8, FP8)))
def test_product_of_every_pair_of_types(fp8, b_tile):
    a, b = operand(200, 512, fp8[0], RUN, 3), operand(264, 512, fp8[1], b_tile, 4)
    out = torch.full((200, 264), torch.nan, device="cuda")
    multiply(a, b, out)
    check(out, a, b)


@pytest.mark.parametrize("b_tile", (SQUARE, RUN))
@pytest.mark.parametrize("shape", [(300, 264, 384), (129, 131, 144), (2048, 1024, 256)])
@pytest.mark.parametrize("tiling", TILINGS, ids=str, indirect=True)
def test_product_is_added_to_the_output(shape, b_tile, tiling):
    rows, cols, depth = shape
    a, b = operand(rows, depth, "e5m2", RUN, 5), operand(cols, depth, "e4m3", b_tile, 6)
    before = torch.randn(rows, cols, device="cuda") * 10
    out = before.clone()
    multiply(a, b, out, accumulate=True)
    check(out, a, b, before)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("bias_dtype", list(ROUNDING))
def test_bias_is_added_before_rounding(bias_dtype, dtype):
    a, b = operand(150, 256, "e4m3", RUN, 7), operand(201, 256, "e4m3", SQUARE, 8)
    bias = torch.randn(201, device="cuda").to(bias_dtype) * 100
    out = torch.full((150, 201), torch.nan, device="cuda", dtype=dtype)
    multiply(a, b, out, bias=bias)
    check(out, a, b, bias.double())


def test_parts_of_larger_matrices_are_multiplied_in_place():
    a, b = operand(200, 512, "e4m3", RUN, 9), operand(140, 512, "e4m3", SQUARE, 10)
    wide = torch.full((200, 200), 5.0, device="cuda", dtype=torch.bfloat16)
    multiply(a, b, wide[:, 16:156])
    check(wide[:, 16:156].contiguous(), a, b)
    assert (wide[:, :16] == 5).all() and (wide[:, 156:] == 5).all()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("phase", [(48, 0), (0, 80), (112, 16)])
@pytest.mark.parametrize(("b_tile", "tiling"), CASES, ids=str, indirect=["tiling"])
def test_a_part_that_begins_inside_of_tiles_has_the_bits_of_the_whole(b_tile, phase, accumulate, tiling):
    if accumulate and tiling.cols != 128:
        pytest.skip("products with tiles of 192 columns are not added")
    col, depth = phase if b_tile == SQUARE else (0, phase[1])
    a, b = operand(700, 528, "e4m3", RUN, 17), operand(672, 528, "e4m3", b_tile, 18)
    a.codes[:, :depth] = 0  # which the part does not have
    bias = torch.randn(672, device="cuda")
    for dtype in (torch.float32,) if accumulate else ROUNDING:
        for width in (672 - col, 16, 80):
            wide, parts = (torch.full((700, 720), 5.0, device="cuda", dtype=dtype) for _ in range(2))
            multiply(a, b, wide[:, :672], bias=bias, accumulate=accumulate)
            product = dict(b_tile=b_tile, phase=(col, depth), parts=1, fp8=("e4m3", "e4m3"), accumulate=accumulate)
            its = slice(col, col + width)
            place = dict(bias=bias[its].contiguous(), out=parts[:, its])
            left, right = (codes[:, depth:].contiguous() for codes in (a.codes, b.codes[its]))
            ops.gemm_float8_block(left, a.scale, right, b.scale, **place, **product)
            wide[:, :col], wide[:, its.stop :] = 5.0, 5.0
            assert_bitwise(parts, wide, f"{width} columns")


@pytest.mark.parametrize("shape", [(512, 512, 65536), (1024, 768, 16400), (64, 4096, 8192), (300, 208, 4112)])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_sums_over_many_rows_are_added_from_their_parts(shape, dtype):
    (rows, cols, depth), accumulate = shape, dtype == torch.float32
    a, b = operand(rows, depth, "e4m3", RUN, 19), operand(cols, depth, "e4m3", RUN, 20)
    parts = gemm.parts_of(rows, cols, -(-depth // gemm.DEPTH), gemm.Kind(False, dtype.itemsize, accumulate))
    assert parts > 1
    below = torch.full((parts * rows, cols), torch.nan, device="cuda")
    product = dict(b_tile=RUN, phase=(0, 0), parts=parts, fp8=("e4m3", "e4m3"), bias=None, accumulate=False)
    ops.gemm_float8_block(a.codes, a.scale, b.codes, b.scale, out=below, **product)
    out = torch.ones(rows, cols, device="cuda", dtype=dtype)
    ops.add_parts(below, accumulate=accumulate, out=out)
    check(out, a, b, torch.full_like(out, float(accumulate)).double())


@pytest.mark.parametrize(("b_tile", "tiling"), CASES, ids=str, indirect=["tiling"])
def test_product_repeats_its_bits(b_tile, tiling):
    a, b = operand(2048, 2048, "e4m3", RUN, 11), operand(1536, 2048, "e4m3", b_tile, 12)
    first, again = (torch.full((2048, 1536), torch.nan, device="cuda") for _ in range(2))
    multiply(a, b, first)
    check_repeats(a, b, first, again)


def check_repeats(a: Operand, b: Operand, want: Tensor, again: Tensor) -> None:
    """The bits of `want`, again and again; compared on the device, so that products follow one another."""
    assert not want.isnan().any()
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(REPEATS):
        again.fill_(torch.nan)
        multiply(a, b, again)
        differs |= (again.view(torch.int32) != want.view(torch.int32)).any()
    assert not differs


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("tiling", TILINGS, ids=str, indirect=True)
def test_a_shorter_ring_gives_the_same_bits(tiling, stages, monkeypatch):
    a, b = operand(2048, 2048, "e4m3", RUN, 11), operand(1536, 2048, "e4m3", SQUARE, 12)
    whole, short = (torch.full((2048, 1536), torch.nan, device="cuda") for _ in range(2))
    multiply(a, b, whole)
    most = gemm.Tiling.stages
    monkeypatch.setattr(gemm.Tiling, "stages", lambda self, *place, **how: min(stages, most(self, *place, **how)))
    monkeypatch.setattr(gemm, "float8_block", cache(gemm.float8_block.__wrapped__))
    check_repeats(a, b, whole, short)


@pytest.mark.parametrize("shape", [(0, 128, 128), (128, 0, 128), (128, 128, 0)])
def test_empty_product(shape):
    rows, cols, depth = shape
    a, b = operand(rows, depth, "e4m3", RUN, 13), operand(cols, depth, "e4m3", SQUARE, 14)
    bias = torch.randn(cols, device="cuda")
    out = torch.full((rows, cols), torch.nan, device="cuda")
    multiply(a, b, out, bias=bias)
    assert torch.equal(out, bias.expand(rows, cols))


def test_rows_at_odd_addresses_are_refused():
    a, b = operand(128, 136, "e4m3", RUN, 15), operand(128, 136, "e4m3", SQUARE, 16)
    with pytest.raises(ValueError, match="multiples of 16"):
        multiply(a, b, torch.empty(128, 128, device="cuda"))


def test_product_in_a_graph():
    a, b = operand(512, 1024, "e4m3", RUN, 17), operand(768, 1024, "e4m3", SQUARE, 18)
    eager, captured = (torch.empty(512, 768, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    multiply(a, b, eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply(a, b, captured)
    captured.fill_(torch.nan)
    graph.replay()
    assert_bitwise(captured, eager, "a product in a graph")
