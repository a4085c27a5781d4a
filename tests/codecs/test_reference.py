"""The oracle against the written definition: amaxes, scales and blocks by vectors computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from te_dist.codecs import reference
from te_dist.formats import WHOLE, Region

INF, NAN = math.inf, math.nan
FLT_MAX = torch.finfo(torch.float32).max
LARGEST_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}


def f32(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def bits_of(x: torch.Tensor) -> list[int]:
    return [b & 0xFFFFFFFF for b in x.contiguous().view(torch.int32).flatten().tolist()]


# --- amax


def brute_amax(x: torch.Tensor, tile: tuple[int, int], phase: tuple[int, int]) -> torch.Tensor:
    rows, cols = Region.whole(*x.shape).blocks(tile)
    if WHOLE not in tile:
        region = Region.whole(phase[0] + x.shape[0], phase[1] + x.shape[1])
        region = region.narrow(0, phase[0], x.shape[0]).narrow(1, phase[1], x.shape[1])
        rows, cols = region.blocks(tile)
    grid = torch.zeros(len(rows), len(cols))
    for r in range(x.shape[0]):
        for c in range(x.shape[1]):
            i = (phase[0] + r) // tile[0] if tile[0] else 0
            j = (phase[1] + c) // tile[1] if tile[1] else 0
            value = abs(float(x[r, c]))
            if not math.isnan(value):
                grid[i, j] = max(float(grid[i, j]), value)
    return grid


@pytest.mark.parametrize("shape", [(5, 9), (1, 1), (8, 4), (0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("tile", [(1, 4), (4, 4), (4, 1), (WHOLE, WHOLE), (1, WHOLE)])
@pytest.mark.parametrize("phase", [(0, 0), (3, 1)])
def test_tile_amax_is_the_largest_magnitude_of_each_tile(shape, tile, phase):
    phase = tuple(p % t if t else 0 for p, t in zip(phase, tile, strict=True))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    expected = brute_amax(x, tile, phase)
    if tile == (1, WHOLE):
        expected = expected.reshape(shape[0], 1)
    actual = reference.tile_amax(x, tile, phase)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_does_not_enter_an_amax_and_infinity_does(dtype):
    x = torch.tensor([[NAN, -3.0, 1.0, NAN], [NAN, NAN, -INF, NAN]], dtype=dtype)
    assert reference.tile_amax(x, (1, 2)).tolist() == [[3.0, 1.0], [0.0, INF]]


def test_a_phase_beyond_the_tile_counts_modulo_it():
    x = torch.randn(7, 9)
    assert torch.equal(reference.tile_amax(x, (4, 4), (9, 6)), reference.tile_amax(x, (4, 4), (1, 2)))
    grid = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(reference.spread(grid, (7, 9), (4, 4), (9, 6)), reference.spread(grid, (7, 9), (4, 4), (1, 2)))


# --- scale rule

SCALES = [
    # amax, fp8, pow2, eps, value_for_inf, bits of the scale
    pytest.param(448.0, "e4m3", False, 0.0, FLT_MAX, 0x3F800000, id="amax-at-the-limit"),
    pytest.param(1.0, "e4m3", False, 0.0, FLT_MAX, 0x43E00000, id="one"),
    pytest.param(1.0, "e4m3", True, 0.0, FLT_MAX, 0x43800000, id="one-rounded-down-to-256"),
    pytest.param(1.0, "e5m2", False, 0.0, FLT_MAX, 0x47600000, id="one-e5m2"),
    pytest.param(1.0, "e5m2", True, 0.0, FLT_MAX, 0x47000000, id="one-rounded-down-to-32768"),
    pytest.param(3.0, "e4m3", False, 0.0, FLT_MAX, 0x43155555, id="division-not-reciprocal"),
    pytest.param(15.0, "e4m3", False, 0.0, FLT_MAX, 0x41EEEEEF, id="division-not-reciprocal-15"),
    pytest.param(7.0, "e4m3", True, 0.0, FLT_MAX, 0x42800000, id="a-power-of-two-stays"),
    pytest.param(0.0, "e4m3", True, 0.0, FLT_MAX, 0x3F800000, id="zero"),
    pytest.param(INF, "e4m3", False, 0.0, FLT_MAX, 0x3F800000, id="infinity"),
    pytest.param(NAN, "e4m3", True, 0.0, FLT_MAX, 0x3F800000, id="nan"),
    pytest.param(NAN, "e4m3", False, 1.0, FLT_MAX, 0x3F800000, id="nan-passes-eps"),
    pytest.param(0.0, "e4m3", False, 1.0, FLT_MAX, 0x43E00000, id="eps-comes-before-the-test-for-zero"),
    pytest.param(2.0, "e4m3", False, 1.0, FLT_MAX, 0x43600000, id="eps-below-amax"),
    pytest.param(2.0**-149, "e4m3", False, 0.0, FLT_MAX, 0x7F7FFFFF, id="overflow-f32"),
    pytest.param(2.0**-149, "e4m3", True, 0.0, FLT_MAX, 0x7F000000, id="overflow-f32-pow2"),
    pytest.param(2.0**-149, "e4m3", False, 0.0, torch.finfo(torch.bfloat16).max, 0x7F7F0000, id="overflow-bf16"),
    pytest.param(2.0**-149, "e4m3", True, 0.0, torch.finfo(torch.bfloat16).max, 0x7F000000, id="overflow-bf16-pow2"),
    pytest.param(2.0**-149, "e5m2", False, 0.0, 65504.0, 0x477FE000, id="overflow-fp16"),
    pytest.param(2.0**-149, "e5m2", True, 0.0, 65504.0, 0x47000000, id="overflow-fp16-pow2"),
    pytest.param(448 * 2.0**-127, "e4m3", False, 0.0, 65504.0, 0x7F000000, id="the-largest-power-still-fits"),
    pytest.param(448 * 2.0**-128, "e4m3", False, 0.0, 65504.0, 0x477FE000, id="the-next-overflows"),
    pytest.param(FLT_MAX, "e4m3", True, 0.0, FLT_MAX, 0x03800000, id="largest-amax"),
]


@pytest.mark.parametrize("amax, fp8, pow2, eps, value_for_inf, expected", SCALES)
def test_the_scale_rule(amax, fp8, pow2, eps, value_for_inf, expected):
    scale = reference.scale_from_amax(torch.tensor([[amax]]), fp8=fp8, pow2=pow2, eps=eps, value_for_inf=value_for_inf)
    assert bits_of(scale) == [expected]


# --- FP8, one scale and blocks


def test_a_tensor_is_multiplied_in_f32_and_cast():
    x = torch.tensor([[1.0, -0.0, 1000.0, NAN, 3.0]], dtype=torch.bfloat16)
    codes = reference.encode_float8_tensor(x, torch.tensor([2.0]), "e4m3")
    # 2 = 0x40, 6 = 1.5 * 4 = 0x4C
    assert codes.tolist() == [[0x40, 0x80, 0x7E, 0x7F, 0x4C]]


def test_a_block_by_hand():
    x = torch.tensor([[3.0, -1.5, 0.0, -0.0]])
    codes, scale_inv = reference.encode_float8_block(x, (1, 128), fp8="e4m3", pow2=False, eps=0.0)
    # scale 448/3; 3 -> 448 and -1.5 -> -224 but for the last bit, which the cast rounds away
    assert codes.tolist() == [[0x7E, 0xF6, 0x00, 0x80]]
    assert bits_of(scale_inv) == [0x3BDB6DB7]
    codes, scale_inv = reference.encode_float8_block(x, (1, 128), fp8="e4m3", pow2=True, eps=0.0)
    # scale 128: 384 = 1.5 * 2^8, -192 = -1.5 * 2^7
    assert codes.tolist() == [[0x7C, 0xF4, 0x00, 0x80]]
    assert scale_inv.tolist() == [[2.0**-7]]


@pytest.mark.parametrize("fp8, one", [("e4m3", 0x38), ("e5m2", 0x3C)])
def test_a_block_with_infinity_has_scale_one_and_a_nan_leaves_the_block_alone(fp8, one):
    x = torch.tensor([[INF, 1.0], [NAN, 1.0], [0.0, -0.0]])
    codes, scale_inv = reference.encode_float8_block(x, (1, 128), fp8=fp8, pow2=True, eps=0.0)
    largest, largest_power = LARGEST_CODE[fp8], {"e4m3": (0x78, 2.0**-8), "e5m2": (0x78, 2.0**-15)}[fp8]
    assert codes.tolist() == [[largest, one], [0x7F, largest_power[0]], [0x00, 0x80]]
    assert scale_inv.tolist() == [[1.0], [largest_power[1]], [1.0]]


@pytest.mark.parametrize(
    "dtype, pow2, expected",
    [
        (torch.float32, True, 0x00400000),
        (torch.bfloat16, True, 0x00400000),
        (torch.float16, True, 0x38000000),  # 2^-15
        (torch.float32, False, 0x00200000),  # 1 / FLT_MAX, just above 2^-128
        (torch.float16, False, 0x37801002),  # 2^-16 (1 + 2^-11 + 2^-22)
    ],
)
def test_an_overflowing_scale_is_the_largest_of_the_input_type(dtype, pow2, expected):
    tiny = torch.tensor([[1.0]], dtype=dtype)
    amax = torch.tensor([[2.0**-149]])
    _, scale_inv = reference.encode_float8_block(tiny, (128, 128), amax=amax, fp8="e4m3", pow2=pow2, eps=0.0)
    assert bits_of(scale_inv) == [expected]


def test_an_amax_from_outside_replaces_that_of_the_block():
    x = torch.full((2, 2), 1.0)
    codes, scale_inv = reference.encode_float8_block(
        x, (1, 128), (0, 0), torch.tensor([[448.0], [1.0]]), fp8="e4m3", pow2=False, eps=0.0
    )
    assert codes.tolist() == [[0x38, 0x38], [0x7E, 0x7E]]
    assert bits_of(scale_inv)[0] == 0x3F800000


# --- MXFP8

E8M0 = [
    # bits of the amax, e8m0
    pytest.param(0x43E00000, 127, id="448-is-exactly-one"),
    pytest.param(0x43E00001, 128, id="rounds-up-above-it"),
    pytest.param(0x3F800000, 119, id="one"),
    pytest.param(0x00000000, 0, id="zero"),
    pytest.param(0x00000001, 0, id="smallest-denormal"),
    pytest.param(0x04600000, 0, id="two-to-minus-127"),
    pytest.param(0x04600004, 1, id="above-two-to-minus-127"),
    pytest.param(0x7F7FFFFF, 247, id="largest-finite"),
    pytest.param(0x7F800000, 254, id="infinity"),
    pytest.param(0x7FC00000, 255, id="nan"),
]


@pytest.mark.parametrize("amax, expected", E8M0)
def test_e8m0_rounds_up(amax, expected):
    assert reference.e8m0_from_amax(f32(amax), "e4m3").tolist() == [expected]


def test_e8m0_of_e5m2():
    # 57344 and the f32 after it; 1; FLT_MAX / 57344 = 2^128 / (1.75 * 2^15), a little above 2^112
    amax = f32(0x47600000, 0x47600001, 0x3F800000, 0x7F7FFFFF)
    assert reference.e8m0_from_amax(amax, "e5m2").tolist() == [127, 128, 112, 240]


def test_e8m0_of_values_beyond_what_an_amax_reaches():
    v = f32(0x7F000000, 0x7F000001, 0x7E800000, 0x7E800001, 0x00400000, 0x00400001, 0x00800000, 0x00800001)
    assert reference.e8m0_ceil(v).tolist() == [254, 254, 253, 254, 0, 1, 1, 2]


def test_powers_of_e8m0():
    e = torch.arange(256).to(torch.uint8)
    assert reference.e8m0_decode(e)[:255].tolist() == [math.ldexp(1.0, i - 127) for i in range(255)]
    assert reference.e8m0_reciprocal(e)[:255].tolist() == [math.ldexp(1.0, 127 - i) for i in range(255)]
    assert bits_of(reference.e8m0_decode(e)[255]) == bits_of(reference.e8m0_reciprocal(e)[255]) == [0x7FFFFFFF]
    assert bits_of(reference.e8m0_decode(e)[0]) == bits_of(reference.e8m0_reciprocal(e)[254]) == [0x00400000]


def test_mxfp8_blocks_by_hand():
    x = torch.tensor([[1.0, -0.5, 0.0, -0.0], [0.0, 0.0, 0.0, -0.0], [INF, -INF, 1.0, NAN], [448.0, 449.0, NAN, 1.0]])
    codes, e = reference.encode_mxfp8(x, (1, 32), fp8="e4m3")
    assert e.tolist() == [[119], [0], [254], [128]]
    assert codes.tolist() == [
        [0x78, 0xF0, 0x00, 0x80],  # times 256
        [0x00, 0x00, 0x00, 0x80],
        [0x7E, 0xFE, 0x00, 0x7F],  # times 2^-127
        [0x76, 0x76, 0x7F, 0x30],  # halved: 224, 224.5, NaN, 0.5
    ]
    decoded = reference.decode_mxfp8(codes, e, (1, 32), (0, 0), "e4m3")
    assert decoded[0].tolist() == [1.0, -0.5, 0.0, 0.0]
    assert decoded[3, [0, 1, 3]].tolist() == [448.0, 448.0, 1.0]


def test_a_nan_amax_from_outside_makes_an_mxfp8_block_nan():
    codes, e = reference.encode_mxfp8(torch.ones(1, 4), (1, 32), amax=torch.tensor([[NAN]]), fp8="e4m3")
    assert e.tolist() == [[255]] and codes.tolist() == [[0x7F] * 4]
    assert reference.decode_mxfp8(codes, e, (1, 32), (0, 0), "e4m3").isnan().all()


# --- laws over cuts


@pytest.mark.parametrize(
    "rows, cols", [((0, 70), (0, 90)), ((3, 40), (5, 61)), ((32, 33), (64, 0)), ((69, 1), (89, 1))]
)
@pytest.mark.parametrize("tile", [(1, 32), (32, 32), (32, 1)])
@pytest.mark.parametrize("encode", ["block", "mxfp8"])
def test_a_cut_matrix_with_the_amax_of_the_whole_has_the_bytes_of_the_whole(encode, tile, rows, cols):
    x = torch.randn(70, 90, generator=torch.Generator().manual_seed(3)) * 10
    region = Region.whole(70, 90).narrow(0, *rows).narrow(1, *cols)
    grid_rows, grid_cols = region.blocks(tile)
    in_grid = (slice(grid_rows.start, grid_rows.stop), slice(grid_cols.start, grid_cols.stop))
    inside = (slice(region.rows.start, region.rows.stop), slice(region.cols.start, region.cols.stop))
    amax = reference.tile_amax(x, tile)

    def run(part, phase, part_amax):
        if encode == "mxfp8":
            return reference.encode_mxfp8(part, tile, phase, part_amax, fp8="e5m2")
        return reference.encode_float8_block(part, tile, phase, part_amax, fp8="e4m3", pow2=False, eps=0.0)

    codes, scale = run(x, (0, 0), None)
    part_codes, part_scale = run(x[inside], region.phase(tile), amax[in_grid])
    assert torch.equal(part_codes, codes[inside])
    assert torch.equal(part_scale, scale[in_grid])


@pytest.mark.parametrize("shape", [(40, 70), (1, 1), (0, 5), (5, 0)])
def test_columnwise_blocks_are_rowwise_blocks_of_the_transpose(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    codes, scale = reference.encode_float8_block(x, (128, 1), fp8="e4m3", pow2=False, eps=0.0)
    codes_t, scale_t = reference.encode_float8_block(x.t(), (1, 128), fp8="e4m3", pow2=False, eps=0.0)
    assert torch.equal(codes, codes_t.t()) and torch.equal(scale, scale_t.t())


def test_decoding_a_block_multiplies_code_by_scale():
    codes = torch.tensor([[0x38, 0xB8], [0x7E, 0x00]], dtype=torch.uint8)
    scale = torch.tensor([[0.5], [3.0]])
    assert reference.decode_float8(codes, scale, (1, 128), (0, 0), "e4m3").tolist() == [[0.5, -0.5], [1344.0, 0.0]]
    one = torch.tensor([[2.0]])
    assert reference.decode_float8(codes, one, (WHOLE, WHOLE), (0, 0), "e4m3")[1].tolist() == [896.0, 0.0]
