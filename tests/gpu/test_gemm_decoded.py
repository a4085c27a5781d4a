"""Products of decoded operands against the float64 product of what the operands stand for."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.catalog import FORMATS, float8_tensorwise, high_precision, mxfp8
from te_dist.codecs import gemm
from te_dist.codecs.decoded import coded
from te_dist.codecs.gemm import Operand
from te_dist.codecs.high_precision import HighPrecision
from te_dist.formats import Direction, Format, Region
from te_dist.tensor import storage
from te_dist.testing import assert_bitwise

pytestmark = pytest.mark.gpu

Side = tuple[Format, Direction]

SHAPES = [(128, 256, 128), (144, 272, 1056), (400, 48, 544)]  # rows, columns, summed: whole tiles, and not
EXTENTS = [(2000, 4128, 992), (70, 130, 66), (2, 6, 2), (34, 18, 300)]  # the last three are read by bytes
UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ROW, COL = Direction.ROWWISE, Direction.COLUMNWISE
MX, NV, BLOCK = FORMATS["mxfp8_1d"], FORMATS["nvfp4_1d"], FORMATS["float8_block_2d_fp32_scales"]
FP16, E5M2 = high_precision(torch.float16), mxfp8(1, fp8="e5m2")
FEW = {
    "powers": ((MX, ROW), (MX, ROW)),
    "powers, turned": ((E5M2, COL), (MX, COL)),
    "floats": ((NV, COL), (NV, ROW)),
    "floats by powers": ((NV, ROW), (MX, COL)),
    "an amax per row": ((FORMATS["nvfp4_row_scaled"], ROW), (NV, ROW)),
    "scaled sums": ((BLOCK, ROW), (BLOCK, COL)),
    "scaled sums of runs": ((FORMATS["float8_block_1d"], ROW), (FORMATS["float8_block_1d"], COL)),
    "scaled sums of powers": ((MX, ROW), (FORMATS["float8_block_1d"], ROW)),
    "weights only": ((FP16, ROW), (BLOCK, ROW)),
    "fp16 by powers": ((FP16, COL), (MX, ROW)),
    "one scale, e5m2": ((FORMATS["float8_tensorwise_e5m2"], ROW), (float8_tensorwise(fp8="e5m2"), COL)),
}


def sides() -> dict[str, Side]:
    """Every distinct encoding of the catalog and the direction it is read in, by name."""
    found: dict[object, tuple[str, Side]] = {}
    for name, fmt in FORMATS.items():
        for way in fmt.directions:
            layout = tuple((field.dtype, field.grain, field.order) for field in fmt[way].fields)
            found.setdefault((fmt[way].codec, layout, way), (f"{name}.{way.value}", (fmt, way)))
    return dict(found.values())


SIDES = sides()


def matrix(kept: int, summed: int, seed: int) -> Tensor:
    """Values of many magnitudes, from tile to tile and inside of them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-12, 1, (kept, -(-summed // 32)), generator=generator)
    return torch.randn(kept, summed, generator=generator) * torch.exp2(exponents).repeat_interleave(32, 1)[:, :summed]


def operand(side: Side, kept: int, summed: int, *, seed: int, region: Region | None = None) -> Operand:
    """A matrix quantized on the GPU; the part of it in `region` alone, where that is given."""
    fmt, way = side
    x = matrix(kept, summed, seed)
    x = (x if way is ROW else x.t()).contiguous().to("cuda", fmt[way].codec.dtype if is_plain(side) else torch.bfloat16)
    held = storage.quantize(x, fmt.select(way))
    if region is not None:
        for dim, span in enumerate((region.rows, region.cols)):
            held = held.narrow(dim, span.start, len(span))
    return Operand(fmt[way], held.stored(way), held.region, 1 if way is ROW else 0)


def is_plain(side: Side) -> bool:
    return isinstance(side[0][side[1]].codec, HighPrecision)


def wanted(a: Operand, b: Operand) -> tuple[Tensor, Tensor]:
    """(product, largest difference from it): sums are rounded, values with fp32 scales, fp16 beside powers of two."""
    left, right = (side.values(torch.float32).double() for side in (a, b))
    unit = 2.0**-23 * (left.shape[1] / 16 + 16)
    if any(side.stored[0].dtype == torch.float16 for side in (a, b)):
        unit += UNITS[torch.bfloat16]
    return left @ right.t(), left.abs() @ right.abs().t() * unit


def check(a: Operand, b: Operand, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Multiplies into poison and compares."""
    out = torch.full((a.extents[0], b.extents[0]), torch.nan, dtype=dtype, device="cuda")
    ops.gemm_decoded(coded(a), coded(b), out=out)
    compare(out, *wanted(a, b), name)
    return out


def compare(out: Tensor, want: Tensor, allowed: Tensor, name: str) -> None:
    rounding = (want.abs() + torch.finfo(out.dtype).tiny) * UNITS[out.dtype]
    excess = (out.double() - want).abs() - allowed - rounding - 1e-37
    assert not out.numel() or excess.max() <= 0, f"{name}: off by {excess.max().item():.3g} more than allowed"


@pytest.mark.parametrize("first", SIDES)
def test_every_pair_of_the_catalog(first):
    for second, shape in product(SIDES, SHAPES):
        if is_plain(SIDES[first]) and is_plain(SIDES[second]):
            continue
        rows, cols, summed = shape
        a, b = operand(SIDES[first], rows, summed, seed=1), operand(SIDES[second], cols, summed, seed=2)
        check(a, b, f"{first} by {second}, {shape}")


@pytest.mark.parametrize("pair", FEW)
def test_extents_types_bias_and_sums(pair):
    a_side, b_side = FEW[pair]
    for rows, cols, summed in EXTENTS:
        a, b = operand(a_side, rows, summed, seed=1), operand(b_side, cols, summed, seed=2)
        name = f"{pair}, {rows} x {cols} x {summed}"
        out = check(a, b, name)
        check(a, b, name, torch.bfloat16)
        check(a, b, name, torch.float16)
        want, allowed = wanted(a, b)
        for dtype in UNITS:
            bias = torch.randn(cols, device="cuda", dtype=dtype)
            before = torch.randn_like(out)
            added = before.clone()
            ops.gemm_decoded(coded(a), coded(b), out=added, bias=bias, accumulate=True)
            want_added = want + bias.double() + before.double()
            compare(added, want_added, allowed + (want.abs() + 100) * 2.0**-22, f"{name}, bias in {dtype}, added")


def test_output_may_be_a_part_of_a_matrix():
    a, b = operand((MX, ROW), 130, 96, seed=1), operand((MX, ROW), 66, 96, seed=2)
    want = check(a, b, "whole")
    for start in (0, 1, 2, 4):
        whole = torch.full((132, 80), 77.0, device="cuda")
        ops.gemm_decoded(coded(a), coded(b), out=whole[1:131, start : start + 66])
        assert_bitwise(whole[1:131, start : start + 66], want, f"columns from {start} on")
        whole[1:131, start : start + 66] = 77.0
        assert (whole == 77.0).all(), f"columns from {start} on: written beside the output"


@pytest.mark.parametrize("pair", FEW)
def test_parts_that_begin_inside_a_tile(pair):
    """A cut at 8 rows and 18 columns of the kept and the summed dimension of both operands."""
    a_side, b_side = FEW[pair]

    def part(side: Side, kept: int, seed: int) -> Operand:
        region = Region.whole(kept, 260) if side[1] is ROW else Region.whole(260, kept)
        summed_dim = 1 if side[1] is ROW else 0
        cut = region.narrow(summed_dim, 18, 200).narrow(1 - summed_dim, 8, kept - 10)
        return operand(side, kept, 260, seed=seed, region=cut)

    check(part(a_side, 150, 1), part(b_side, 140, 2), pair)


def test_tiles_that_begin_at_different_places_are_refused():
    whole = operand((MX, ROW), 32, 96, seed=1)
    region = Region.whole(32, 112).narrow(1, 16, 96)
    cut = operand((MX, ROW), 32, 112, seed=2, region=region)
    with pytest.raises(ValueError, match="cut both matrices"):
        ops.gemm_decoded(coded(whole), coded(cut), out=torch.empty(32, 32, device="cuda"))


@pytest.mark.parametrize("fmt", [MX, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("way", [ROW, COL])
def test_every_code_and_every_power_of_two(fmt, way):
    """NaN, infinities, scales at both ends: every row has one code and one scale that others have not."""
    a, b = operand((fmt, way), 256, 64, seed=1), operand((MX, ROW), 32, 64, seed=2)
    codes, scale = coded(a).codes, coded(a).scale
    codes[:, 5] = torch.arange(256, dtype=torch.uint8, device="cuda")
    scale[:, 1] = torch.arange(256, dtype=torch.uint8, device="cuda")
    for power, rows in ((160, slice(0, 128)), (90, slice(64, 256))):  # neither overflows nor vanishes
        coded(b).scale.fill_(power)
        out = torch.empty(256, 32, device="cuda")
        ops.gemm_decoded(coded(a), coded(b), out=out)
        want, allowed = (part[rows] for part in wanted(a, b))
        finite = want.isfinite()
        assert torch.equal(out[rows].isnan(), want.isnan()), "NaN in other places"
        assert torch.equal(out[rows].isinf(), want.isinf()), "infinity in other places"
        vanished = 2.0**-133 * b.values(torch.float32).double().abs().sum(1).expand_as(want)
        compare(out[rows][finite], want[finite], (allowed + vanished)[finite], f"scales of 2^{power - 127}")


def test_every_code_and_scale_of_four_bits():
    a, b = operand((NV, ROW), 256, 64, seed=1), operand((MX, ROW), 32, 64, seed=2)
    coded(a).codes[:, 3] = torch.arange(256, dtype=torch.uint8, device="cuda")
    coded(a).scale[:, 2] = torch.arange(256, dtype=torch.uint8, device="cuda")
    for other in (b, operand((NV, ROW), 32, 64, seed=2)):
        out = torch.empty(256, 32, device="cuda")
        ops.gemm_decoded(coded(a), coded(other), out=out)
        want, allowed = wanted(a, other)
        assert torch.equal(out.isnan(), want.isnan()), "NaN in other places"
        compare(out[~out.isnan()], want[~out.isnan()], allowed[~out.isnan()], "finite")


@pytest.mark.parametrize("pair", FEW)
def test_repeats_give_the_same_bytes(pair):
    a, b = operand(FEW[pair][0], 2304, 1056, seed=1), operand(FEW[pair][1], 2320, 1056, seed=2)
    want = check(a, b, pair)
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    out = torch.empty_like(want)
    for turn in range(200):
        out.fill_(turn)
        ops.gemm_decoded(coded(a), coded(b), out=out)
        differs |= (out != want).any()
    assert not differs


def test_nothing_to_sum_or_to_write():
    bias = torch.randn(32, device="cuda")
    for rows, cols, summed in [(16, 32, 0), (0, 32, 64), (16, 0, 64)]:
        region = Region.whole(32, 64).narrow(1, 0, summed)
        a = operand((MX, ROW), 32, 64, seed=1, region=region.narrow(0, 0, rows))
        b = operand((MX, ROW), 32, 64, seed=2, region=region.narrow(0, 0, cols))
        out = torch.full((rows, cols), 7.0, device="cuda")
        ops.gemm_decoded(coded(a), coded(b), out=out, bias=bias[:cols])
        assert_bitwise(out, bias[:cols].expand(rows, cols), f"{rows} x {cols} x {summed}")
        ops.gemm_decoded(coded(a), coded(b), out=out, accumulate=True)
        assert_bitwise(out, bias[:cols].expand(rows, cols), f"{rows} x {cols} x {summed}, added")


def test_the_table_multiplies_by_decoding():
    a, b = operand((MX, ROW), 64, 96, seed=1), operand((NV, ROW), 48, 96, seed=2)
    out = gemm.multiply(a, b, dtype=torch.float32)
    assert_bitwise(out, check(a, b, "MXFP8 by NVFP4"), "through the table")
