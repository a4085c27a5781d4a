"""Compiled quantizers against the oracle, byte by byte, at every SIMD level this CPU can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.codecs import reference
from te_dist.formats import WHOLE
from te_dist.ops._checks import grid_shape
from te_dist.ops.quantize_float8_current import WORKSPACE
from te_dist.testing import assert_bitwise
from tests.codecs.kernel_inputs import DTYPES, KINDS, check_noop, every_level, matrix, pack, scale_view

# Whole tiles and ragged edges, cuts through tiles (row and column phase), single rows and columns, nothing.
PLACES = [
    ((140, 260), (0, 0)),
    ((200, 170), (64, 32)),
    ((130, 70), (100, 90)),
    ((1, 515), (5, 1)),
    ((260, 1), (0, 127)),
    ((0, 128), (0, 0)),
    ((128, 0), (0, 0)),
]

FP8_RULES = [
    dict(fp8="e4m3", pow2=True, eps=0.0),
    dict(fp8="e4m3", pow2=False, eps=1e-4),
    dict(fp8="e5m2", pow2=False, eps=0.0),
]
of_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def inputs(shape: tuple[int, int], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every kind in bf16, the kinds in which dtypes differ in the others."""
    for kind in KINDS if dtype == torch.bfloat16 else ("wide", "extreme", "tiny"):
        yield f"{kind} {dtype} {shape}", matrix(kind, shape, dtype)


def poison(planes: dict) -> None:
    for key, buffer in planes.items():
        if key.endswith(("_data", "_scale")):
            buffer.fill_(77)


def foreign_amax(x: Tensor, tile: tuple[int, int], phase: tuple[int, int]) -> Tensor:
    """An amax that other ranks had a part in: larger, smaller, infinite, NaN or zero."""
    amax = reference.tile_amax(x, tile, phase)
    factor = torch.tensor([1.0, 2.5, 0.3, 1.0, torch.inf, 1.0, torch.nan, 0.0])
    index = torch.arange(amax.numel()).reshape(amax.shape) % len(factor)
    return (amax * factor[index]).nan_to_num(nan=torch.nan, posinf=torch.inf)


@pytest.mark.pairwise
@of_every_dtype
@pytest.mark.parametrize(
    "tile", [(1, 128), (128, 1), (128, 128), (32, 32), (16, 1), (WHOLE, WHOLE), (1, WHOLE), (WHOLE, 16), (3, 5)]
)
@pytest.mark.parametrize(("shape", "phase"), [*PLACES, ((700, 1500), (3, 3))])
def test_tile_amax(tile, shape, phase, dtype):
    phase = tuple(p % t if t else 0 for p, t in zip(phase, tile, strict=True))
    for name, x in inputs(shape, dtype):
        want = reference.tile_amax(x, tile, phase)
        for level in every_level():
            out = torch.full(grid_shape(shape, phase, tile), 77.0)
            ops.tile_amax(x, phase=phase, tile=tile, out=out)
            assert_bitwise(out, want, f"{name} {level}")


@pytest.mark.pairwise
@of_every_dtype
@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", [1.0, 3.7, 2.0**100, 1e-42, torch.inf, torch.nan])
@pytest.mark.parametrize("shape", [shape for shape, _ in PLACES])
def test_float8_tensor(shape, fp8, scale, dtype):
    scale = torch.tensor([scale])
    for name, x in inputs(shape, dtype):
        want = reference.encode_float8_tensor(x, scale, fp8)
        for level in every_level():
            row, col = torch.full(shape, 77, dtype=torch.uint8), torch.full(shape[::-1], 77, dtype=torch.uint8)
            ops.quantize_float8_tensor(x, scale, fp8=fp8, row_data=row, col_data=col)
            assert_bitwise(row, want, f"row of {name} {level}")
            assert_bitwise(col, want.t(), f"col of {name} {level}")
            row.fill_(77)
            ops.quantize_float8_tensor(x, scale, fp8=fp8, row_data=row)
            assert_bitwise(row, want, f"row alone of {name} {level}")


def tensor_planes(shape: tuple[int, int]) -> dict[str, Tensor]:
    data = {"row_data": torch.empty(shape, dtype=torch.uint8), "col_data": torch.empty(shape[::-1], dtype=torch.uint8)}
    return data | {"row_scale": torch.empty(1, 1), "col_scale": torch.empty(1, 1)}


def check_tensor_planes(planes: dict[str, Tensor], x: Tensor, scale: Tensor, fp8: str, name: str) -> None:
    want = reference.encode_float8_tensor(x, scale.view(1), fp8)
    assert_bitwise(planes["row_data"], want, f"row of {name}")
    assert_bitwise(planes["col_data"], want.t(), f"col of {name}")
    for side in ("row", "col"):
        assert_bitwise(planes[f"{side}_scale"], scale.reciprocal().view(1, 1), f"{side} scale of {name}")


@pytest.mark.pairwise
@of_every_dtype
@pytest.mark.parametrize("rule", FP8_RULES)
@pytest.mark.parametrize("shape", [*(shape for shape, _ in PLACES), (0, 7)])
def test_float8_current(shape, rule, dtype):
    for name, x in inputs(shape, dtype):
        found = reference.tile_amax(x, (WHOLE, WHOLE)) if x.numel() else torch.zeros(1, 1)
        for given in (None, found * 1.5, torch.tensor([torch.inf]), torch.tensor([torch.nan]), torch.zeros(1)):
            amax = found if given is None else given
            scale = reference.scale_from_amax(amax, **rule, value_for_inf=torch.finfo(torch.float32).max)
            for level in every_level():
                planes, workspace = tensor_planes(shape), torch.empty(WORKSPACE)
                poison(planes)
                ops.quantize_float8_current(x, **rule, amax=given, workspace=workspace, **planes)
                check_tensor_planes(planes, x, scale, rule["fp8"], f"{name} {given} {level}")


@pytest.mark.pairwise
@of_every_dtype
@pytest.mark.parametrize("shape", [shape for shape, _ in PLACES])
def test_float8_tensor_records_the_amax(shape, dtype):
    for name, x in inputs(shape, dtype):
        found = reference.tile_amax(x, (WHOLE, WHOLE)).view(1)
        for before in (torch.zeros(1), found * 2, torch.full((1,), torch.inf)):
            planes, amax, scale = tensor_planes(shape), before.clone(), torch.tensor([3.0])
            poison(planes)
            ops.quantize_float8_tensor(x, scale, fp8="e4m3", amax=amax, **planes)
            assert_bitwise(amax, torch.maximum(before, found), f"amax of {name} after {before}")
            check_tensor_planes(planes, x, scale, "e4m3", name)


def test_nothing_is_written_where_noop_is_set():
    check_noop("cpu")


SIDES = [
    {"row": (1, 128), "col": (128, 1)},
    {"row": (128, 128), "col": (128, 128)},
    {"row": (128, 128), "col": (128, 1)},
    {"row": (1, 128)},
    {"col": (128, 128)},
]


@pytest.mark.pairwise
@of_every_dtype
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("rule", FP8_RULES)
@pytest.mark.parametrize(("shape", "phase"), PLACES)
def test_float8_block(shape, phase, rule, given, dtype):
    for name, x in inputs(shape, dtype):
        amaxes = {tile: foreign_amax(x, tile, phase) if given else None for tile in ((1, 128), (128, 1), (128, 128))}
        wanted = {tile: reference.encode_float8_block(x, tile, phase, amax, **rule) for tile, amax in amaxes.items()}
        for tiles in SIDES:
            planes = {}
            for side, tile in tiles.items():
                scales = wanted[tile][1]
                view = scale_view(tuple(scales.shape), torch.float32, order="km" if side == "row" else "mk")
                data = torch.empty(shape if side == "row" else shape[::-1], dtype=torch.uint8)
                planes |= {f"{side}_tile": tile, f"{side}_amax": amaxes[tile], f"{side}_data": data}
                planes[f"{side}_scale"] = view
            for level in every_level():
                poison(planes)
                ops.quantize_float8_block(x, phase=phase, **rule, **planes)
                for side, tile in tiles.items():
                    codes, scales = wanted[tile]
                    assert_bitwise(planes[f"{side}_scale"], scales, f"{side} scales {tiles} of {name} {level}")
                    codes = codes if side == "row" else codes.t()
                    assert_bitwise(planes[f"{side}_data"], codes, f"{side} codes {tiles} of {name} {level}")


@pytest.mark.pairwise
@of_every_dtype
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("shape", "phase"), PLACES)
def test_mxfp8(shape, phase, fp8, given, dtype):
    for name, x in inputs(shape, dtype):
        for tiles in ({"row": (1, 32), "col": (32, 1)}, {"row": (32, 32), "col": (32, 32)}, {"col": (32, 1)}):
            planes, wanted = {}, {}
            for side, tile in tiles.items():
                amax = foreign_amax(x, tile, phase) if given else None
                codes, scales = reference.encode_mxfp8(x, tile, phase, amax, fp8=fp8)
                wanted |= {f"{side}_data": codes, f"{side}_scale": repeated(scales, side, tile, shape, phase)}
                view = scale_view(tuple(wanted[f"{side}_scale"].shape), torch.uint8, order="mk")
                planes |= {f"{side}_tile": tile, f"{side}_amax": amax, f"{side}_scale": view}
                planes[f"{side}_data"] = torch.full(shape, 77, dtype=torch.uint8)
            for level in every_level():
                poison(planes)
                ops.quantize_mxfp8(x, phase=phase, fp8=fp8, **planes)
                for key, want in wanted.items():
                    assert_bitwise(planes[key], want, f"{key} {tiles} of {name} {level}")


def repeated(
    scales: Tensor, side: str, tile: tuple[int, int], shape: tuple[int, int], phase: tuple[int, int]
) -> Tensor:
    """Scales of tiles as they are stored: one for every row (or column) of a square tile."""
    if 1 in tile:
        return scales
    rows, cols = scales.shape
    if side == "row":
        return reference.spread(scales, (shape[0], cols), (tile[0], 1), (phase[0], 0))
    return reference.spread(scales, (rows, shape[1]), (1, tile[1]), (0, phase[1]))


# Two values share a byte: even extents and phases.
EVEN_PLACES = [((34, 546), (0, 0)), ((40, 70), (0, 0)), ((70, 40), (6, 10)), ((2, 514), (14, 2)), ((0, 32), (0, 0))]
SQUARES, RUNS = {"row": (16, 16), "col": (16, 16)}, {"row": (1, 16), "col": (16, 1)}
NVFP4_RULES = [
    dict(e4m3_max=448, four_over_six="none", rng_state=None),
    dict(e4m3_max=448, four_over_six="mae", rng_state=None),
    dict(e4m3_max=256, four_over_six="mse", rng_state=None),
    dict(e4m3_max=448, four_over_six="none", rng_state=torch.tensor([-(2**61) + 12345, 2**32 - 3])),
]


@pytest.mark.pairwise
@of_every_dtype
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("rule", NVFP4_RULES)
@pytest.mark.parametrize(("shape", "phase"), EVEN_PLACES)
def test_nvfp4(shape, phase, rule, given, dtype):
    for name, x in inputs(shape, dtype):
        tensor_amax = reference.tile_amax(x, (WHOLE, WHOLE)) * (1.5 if given else 1.0)
        for tiles in (RUNS, SQUARES):
            check_nvfp4(name, x, phase, rule, {side: (tile, tensor_amax) for side, tile in tiles.items()}, given)


@pytest.mark.pairwise
@of_every_dtype
@pytest.mark.parametrize("rule", NVFP4_RULES)
@pytest.mark.parametrize(("shape", "phase"), EVEN_PLACES)
def test_nvfp4_with_an_amax_for_every_row(shape, phase, rule, dtype):
    for name, x in inputs(shape, dtype):
        check_nvfp4(name, x, phase, rule, {"row": ((1, 16), reference.tile_amax(x, (1, WHOLE)))}, given=False)


def check_nvfp4(name: str, x: Tensor, phase: tuple[int, int], rule: dict, sides: dict, given: bool) -> None:
    planes, wanted = {}, {}
    for side, (tile, tensor_amax) in sides.items():
        amax = foreign_amax(x, tile, phase) if given else None
        codes, scales = reference.encode_nvfp4(x, tile, phase, tensor_amax, amax, **rule)
        wanted[f"{side}_data"] = pack(codes if side == "row" else codes.t())
        wanted[f"{side}_scale"] = repeated(scales, side, tile, x.shape, phase)
        order = "mk" if side == "row" else "km"
        planes |= {
            f"{side}_tile": tile,
            f"{side}_amax": amax,
            f"{side}_tensor_amax": tensor_amax,
            f"{side}_data": torch.full_like(wanted[f"{side}_data"], 77),
            f"{side}_scale": scale_view(tuple(wanted[f"{side}_scale"].shape), torch.uint8, order=order),
        }
    for level in every_level():
        poison(planes)
        ops.quantize_nvfp4(x, phase=phase, **rule, **planes)
        for key, want in wanted.items():
            assert_bitwise(planes[key], want, f"{key} {rule} {sides.keys()} of {name} {level}")


@pytest.mark.pairwise
@of_every_dtype
@pytest.mark.parametrize("states", [None, (11, 12), (13, 14, 15, 16)], ids=["nearest", "one", "two"])
@pytest.mark.parametrize(("shape", "phase"), [((48, 70), (0, 0)), ((64, 40), (16, 6))])
def test_nvfp4_of_the_hadamard_transform(shape, phase, states, dtype):
    """Columns are those of the transformed matrix, rounded to bf16, found and quantized on its own."""
    rng_state = states and torch.tensor(states).view(-1, 2).squeeze(0)
    of_row, of_col = rng_state if states and len(states) == 4 else (rng_state, rng_state)
    rule = dict(e4m3_max=448, four_over_six="none")
    for name, x in inputs(shape, dtype):
        rotated = reference.hadamard(x.bfloat16(), 0xD7E8)
        amaxes = [reference.tile_amax(source, (WHOLE, WHOLE)) for source in (x, rotated)]
        row_amax, col_amax = torch.empty(1, 1), torch.empty(1, 1)
        ops.direction_amax(x, hadamard=0xD7E8, row_amax=row_amax, col_amax=col_amax)
        assert_bitwise(row_amax, amaxes[0], name)
        assert_bitwise(col_amax, amaxes[1], name)
        row_codes, row_scale = reference.encode_nvfp4(x, (1, 16), phase, row_amax, None, rng_state=of_row, **rule)
        codes, col_scale = reference.encode_nvfp4(rotated, (16, 1), phase, col_amax, None, rng_state=of_col, **rule)
        wanted = dict(row_data=pack(row_codes), row_scale=row_scale, col_data=pack(codes.t()), col_scale=col_scale)
        planes = {key: torch.full_like(want, 77) for key, want in wanted.items()}
        tiles = dict(row_tile=(1, 16), row_tensor_amax=row_amax, col_tile=(16, 1), col_tensor_amax=col_amax)
        ops.quantize_nvfp4(x, phase=phase, rng_state=rng_state, col_hadamard=0xD7E8, **rule, **tiles, **planes)
        for key, want in wanted.items():
            assert_bitwise(planes[key], want, f"{key} of {name}")


@pytest.mark.parametrize("sign_mask", [0, 0xD7E8, 0xFFFF])
@pytest.mark.parametrize("shape", [(16, 1), (64, 100), (0, 5), (256, 64)])
def test_hadamard(shape, sign_mask):
    for kind in KINDS:
        x = matrix(kind, shape, torch.bfloat16)
        want = reference.hadamard(x, sign_mask)
        for level in every_level():
            out = torch.full_like(x, 77)
            ops.hadamard(x, sign_mask=sign_mask, out=out)
            assert_bitwise(out.masked_fill(out.isnan(), 0), want.masked_fill(want.isnan(), 0), f"{kind} {level}")
            assert torch.equal(out.isnan(), want.isnan())


@pytest.mark.parametrize("threads", [1, 2])
def test_matrices_large_enough_for_threads_give_the_same_bytes(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = matrix("wide", (640, 1100), torch.bfloat16)
        out = torch.empty(1, 1)
        ops.tile_amax(x, phase=(0, 0), tile=(WHOLE, WHOLE), out=out)
        assert_bitwise(out, reference.tile_amax(x, (WHOLE, WHOLE)), "amax")
        codes, scales = reference.encode_float8_block(x, (1, 128), fp8="e4m3", pow2=True, eps=0.0)
        data, scale = torch.empty_like(codes), torch.empty_like(scales)
        rule = dict(phase=(0, 0), fp8="e4m3", pow2=True, eps=0.0)
        ops.quantize_float8_block(x, **rule, row_tile=(1, 128), row_data=data, row_scale=scale)
        assert_bitwise(data, codes, "codes")
        assert_bitwise(scale, scales, "scales")
    finally:
        torch.set_num_threads(before)


def test_every_bf16_value_is_cast_alike():
    """All 65536 values through both FP8 types, at scales that make normal, subnormal and overflowing codes."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(512, 128)
    for fp8 in ("e4m3", "e5m2"):
        for exponent in range(-130, 128, 6):
            scale = torch.tensor([2.0**exponent])
            want = reference.encode_float8_tensor(x, scale, fp8)
            for level in every_level():
                out = torch.empty(x.shape, dtype=torch.uint8)
                ops.quantize_float8_tensor(x, scale, fp8=fp8, row_data=out)
                assert_bitwise(out, want, f"{fp8} at 2^{exponent}, {level}")
