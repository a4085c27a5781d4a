"""FP8 casts of the oracle, by enumeration of all codes with exact midpoints."""

from __future__ import annotations

import math

import pytest
import torch

from te_dist.codecs import reference

INF, NAN = math.inf, math.nan
TORCH_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}
LAYOUT = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}  # exponent bits, mantissa bits, bias


def enumerated(fp8: str) -> torch.Tensor:
    """Values (f64) of the positive finite codes, from the bits of each."""
    exponent_bits, mantissa_bits, bias = LAYOUT[fp8]
    values = []
    for code in range(LARGEST_CODE[fp8] + 1):
        exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
        significand = mantissa / 2**mantissa_bits + (exponent > 0)
        values.append(significand * 2.0 ** (max(exponent, 1) - bias))
    return torch.tensor(values, dtype=torch.float64)


def nearest_even(magnitude: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest of `values`, the even one of two equally near; all distances taken in f64, where exact."""
    distance = (magnitude.double().clamp(max=values[-1])[:, None] - values).abs()
    near = distance == distance.min(1, keepdim=True).values
    even = near & (torch.arange(len(values)) % 2 == 0)
    return torch.where(even.any(1), even.int().argmax(1), near.int().argmax(1)).to(torch.uint8)


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_every_code_is_a_fixed_point_of_decode_and_cast(fp8):
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = reference.float8_decode(codes, fp8)
    finite = (codes & 0x7F) <= LARGEST_CODE[fp8]
    assert torch.equal(reference.float8_cast(decoded, fp8)[finite], codes[finite])
    assert torch.equal(decoded[: LARGEST_CODE[fp8] + 1].double(), enumerated(fp8))
    assert torch.equal(decoded[finite].signbit(), codes[finite] > 0x7F)


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_decoding_agrees_with_torch_on_all_codes(fp8):
    codes = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(
        reference.float8_decode(codes, fp8), codes.view(TORCH_FP8[fp8]).float(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_a_tie_goes_to_the_even_code_and_its_neighbours_to_their_side(fp8, sign):
    values = enumerated(fp8)
    middle = ((values[:-1] + values[1:]) / 2).float()
    assert torch.equal(middle.double() * 2, values[:-1] + values[1:]), "the midpoints must be exact in f32"
    lower = torch.arange(LARGEST_CODE[fp8], dtype=torch.uint8)
    sign_bit = 0x80 if sign < 0 else 0
    infinity, zero = torch.tensor(INF), torch.tensor(0.0)
    cast = lambda y: reference.float8_cast(y * sign, fp8)  # noqa: E731
    assert torch.equal(cast(middle), lower + lower % 2 | sign_bit)
    assert torch.equal(cast(torch.nextafter(middle, zero)), lower | sign_bit)
    assert torch.equal(cast(torch.nextafter(middle, infinity)), lower + 1 | sign_bit)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_every_16_bit_input_is_cast_to_the_nearest_code(fp8, dtype):
    y = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    y = y[~y.isnan()]
    expected = nearest_even(y.abs(), enumerated(fp8)) | y.signbit().to(torch.uint8) << 7
    assert torch.equal(reference.float8_cast(y, fp8), expected)


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_random_f32_bits_are_cast_as_torch_casts_what_is_clamped(fp8):
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32).view(torch.float32)
    y = y[~y.isnan()]
    limit = reference.fp8_max(fp8)
    assert torch.equal(reference.float8_cast(y, fp8), y.clamp(-limit, limit).to(TORCH_FP8[fp8]).view(torch.uint8))


@pytest.mark.parametrize("fp8, largest", [("e4m3", 0x7E), ("e5m2", 0x7B)])
def test_casts_saturate_keep_negative_zero_and_make_every_nan_the_same(fp8, largest):
    y = torch.tensor([INF, -INF, 3.4e38, -3.4e38, 0.0, -0.0, -1e-30, NAN, -NAN])
    expected = [largest, largest | 0x80, largest, largest | 0x80, 0, 0x80, 0x80, 0x7F, 0x7F]
    assert reference.float8_cast(y, fp8).tolist() == expected


def test_an_unknown_fp8_type_is_named():
    with pytest.raises(ValueError, match="e3m4"):
        reference.float8_cast(torch.zeros(1), "e3m4")
