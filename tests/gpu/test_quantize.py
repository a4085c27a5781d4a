"""CUDA quantizers against the CPU's, byte by byte, padding included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.formats import WHOLE
from te_dist.ops._checks import grid_shape
from te_dist.ops.quantize_float8_current import WORKSPACE
from tests.codecs.kernel_inputs import DTYPES, KINDS, check_noop, matrix, scale_view
from tests.gpu.twins import check_twins, shifted

pytestmark = pytest.mark.gpu

Pair = tuple[int, int]

# Whole tiles, ragged edges, cuts through tiles, single rows and columns; elements between the storage's start and x.
PLACES = [
    ((384, 512), (0, 0), 0),
    ((140, 264), (0, 0), 0),
    ((200, 170), (64, 32), 0),
    ((130, 70), (100, 90), 1),
    ((1, 515), (5, 1), 0),
    ((260, 1), (0, 127), 3),
    ((0, 128), (0, 0), 0),
]
ALIGNED = PLACES[:2]


def inputs(shape: Pair, shift: int = 0) -> list[tuple[str, Tensor]]:
    """Every kind in bf16, the kinds in which dtypes differ in the others."""
    found = []
    for dtype in DTYPES:
        for kind in KINDS if dtype == torch.bfloat16 else ("wide", "extreme", "tiny", "special"):
            found.append((f"{kind} {dtype} {shape}", shifted(matrix(kind, shape, dtype), shift)))
    return found


def foreign_amax(x: Tensor, tile: Pair, phase: Pair) -> Tensor:
    """An amax that other ranks had a part in: larger, smaller, infinite, NaN or zero."""
    amax = torch.empty(grid_shape(x.shape, phase, tile))
    inner = tuple(p % t for p, t in zip(phase, tile, strict=True))
    ops.tile_amax(x, phase=inner, tile=tile, out=amax)
    factor = torch.tensor([1.0, 2.5, 0.3, 1.0, torch.inf, 1.0, torch.nan, 0.0])
    return amax * factor[torch.arange(amax.numel()).reshape(amax.shape) % len(factor)]


def planes(x: Tensor, phase: Pair, sides: dict[str, Pair], codec: str) -> tuple[dict, dict]:
    """Tiles and poisoned outputs of each direction, as fields of that codec lie."""
    rows, cols = x.shape
    fixed, outputs = {}, {}
    for side, tile in sides.items():
        is_row, length = side == "row", max(tile)
        grain = tile if codec == "block" else (1, length) if is_row else (length, 1)
        shape = grid_shape(x.shape, phase, grain)
        dtype = torch.float32 if codec == "block" else torch.uint8
        order = "km" if is_row == (codec == "block") else "mk"
        data = (rows, cols) if is_row or codec == "mx" else (cols, rows)
        if codec == "nvfp4":
            data = (data[0], data[1] // 2)
        fixed[f"{side}_tile"] = tile
        outputs[f"{side}_data"] = torch.empty(data, dtype=torch.uint8)
        outputs[f"{side}_scale"] = scale_view(shape, dtype, order=order)
    return fixed, outputs


def amaxes(x: Tensor, phase: Pair, sides: dict[str, Pair]) -> dict[str, Tensor]:
    return {f"{side}_amax": foreign_amax(x, tile, phase) for side, tile in sides.items()}


@pytest.mark.parametrize(
    "tile",
    [
        (1, 128),
        (128, 1),
        (128, 128),
        (32, 32),
        (16, 1),
        (4, 8),
        (2, 256),
        (64, 512),
        (WHOLE, WHOLE),
        (1, WHOLE),
        (WHOLE, 16),
        (3, 5),
    ],
)
@pytest.mark.parametrize(("shape", "phase", "shift"), [*PLACES, ((700, 4100), (3, 3), 0)])
def test_tile_amax(tile, shape, phase, shift):
    phase = tuple(p % t if t else 0 for p, t in zip(phase, tile, strict=True))
    for name, x in inputs(shape, shift):
        check_twins(
            ops.tile_amax, {"out": torch.empty(grid_shape(shape, phase, tile))}, name, x=x, phase=phase, tile=tile
        )


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("shape", "phase", "shift"), PLACES)
def test_float8_tensor(shape, phase, shift, fp8):
    for name, x in inputs(shape, shift):
        for scale in (1.0, 3.7, 2.0**100, 1e-42, torch.inf, torch.nan):
            outputs = {
                key: torch.empty(size, dtype=torch.uint8)
                for key, size in (("row_data", shape), ("col_data", shape[::-1]))
            }
            everything = outputs
            if scale == scale:  # the payload of NaN differs
                everything = outputs | {"row_scale": torch.empty(1, 1), "col_scale": torch.empty(1, 1)}
            check_twins(
                ops.quantize_float8_tensor, everything, f"{name} by {scale}", x=x, scale=torch.tensor([scale]), fp8=fp8
            )
        for key, alone in outputs.items():
            recorded = {key: alone, "amax": torch.empty(1)}
            check_twins(ops.quantize_float8_tensor, {key: alone}, name, x=x, scale=torch.tensor([3.0]), fp8=fp8)
            check_twins(ops.quantize_float8_tensor, recorded, name, x=x, scale=torch.tensor([3.0]), fp8=fp8)


@pytest.mark.parametrize(("fp8", "pow2", "eps"), [("e4m3", True, 0.0), ("e4m3", False, 1e-4), ("e5m2", False, 0.0)])
@pytest.mark.parametrize(("shape", "phase", "shift"), [*PLACES, ((128, 0), (0, 0), 0), ((1300, 2048), (0, 0), 0)])
def test_float8_current(shape, phase, shift, fp8, pow2, eps):
    rule = dict(fp8=fp8, pow2=pow2, eps=eps)
    for name, x in inputs(shape, shift):
        row = {"row_data": torch.empty(shape, dtype=torch.uint8), "row_scale": torch.empty(1, 1)}
        col = {"col_data": torch.empty(shape[::-1], dtype=torch.uint8), "col_scale": torch.empty(1, 1)}
        for outputs in (row, col, row | col):
            check_twins(
                ops.quantize_float8_current, outputs, f"{name} {rule}", x=x, workspace=torch.empty(WORKSPACE), **rule
            )
        for amax in (3.3, 0.0, torch.inf, torch.nan):
            given = torch.tensor([amax])
            check_twins(ops.quantize_float8_current, row | col, f"{name} {rule} {amax}", x=x, amax=given, **rule)


def test_nothing_is_written_where_noop_is_set():
    check_noop("cuda")


@pytest.mark.parametrize(
    "sides",
    [
        {"row": (1, 128), "col": (128, 1)},
        {"row": (128, 128), "col": (128, 128)},
        {"row": (128, 128), "col": (128, 1)},
        {"row": (1, 128)},
        {"col": (128, 1)},
        {"col": (128, 128)},
    ],
)
@pytest.mark.parametrize(("shape", "phase", "shift"), PLACES)
def test_float8_block(shape, phase, shift, sides):
    for name, x in inputs(shape, shift):
        fixed, outputs = planes(x, phase, sides, "block")
        for fp8, pow2, eps in (("e4m3", True, 0.0), ("e4m3", False, 1e-4), ("e5m2", False, 0.0)):
            rule = dict(phase=phase, fp8=fp8, pow2=pow2, eps=eps)
            check_twins(ops.quantize_float8_block, outputs, f"{name} {rule}", x=x, **rule, **fixed)
            given = amaxes(x, phase, sides)
            check_twins(ops.quantize_float8_block, outputs, f"{name} {rule} given", x=x, **rule, **fixed, **given)


@pytest.mark.parametrize(
    "sides", [{"row": (1, 32), "col": (32, 1)}, {"row": (32, 32), "col": (32, 32)}, {"col": (32, 1)}]
)
@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("shape", "phase", "shift"), PLACES)
def test_mxfp8(shape, phase, shift, fp8, sides):
    for name, x in inputs(shape, shift):
        fixed, outputs = planes(x, phase, sides, "mx")
        rule = dict(phase=phase, fp8=fp8)
        check_twins(ops.quantize_mxfp8, outputs, name, x=x, **rule, **fixed)
        check_twins(ops.quantize_mxfp8, outputs, f"{name} given", x=x, **rule, **fixed, **amaxes(x, phase, sides))


EVEN_PLACES = [((256, 512), (0, 0)), ((34, 546), (0, 0)), ((40, 70), (0, 0)), ((70, 40), (6, 10)), ((2, 514), (14, 2))]
SQUARES, RUNS = {"row": (16, 16), "col": (16, 16)}, {"row": (1, 16), "col": (16, 1)}
STATE = torch.tensor([-(2**61) + 12345, 2**32 - 3])
RULES = [
    dict(e4m3_max=448, four_over_six="none", rng_state=None),
    dict(e4m3_max=448, four_over_six="mae", rng_state=None),
    dict(e4m3_max=256, four_over_six="mse", rng_state=None),
    dict(e4m3_max=448, four_over_six="none", rng_state=STATE),
]


@pytest.mark.parametrize("sides", [RUNS, SQUARES, {"row": (1, 16)}, {"col": (16, 1)}])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule['four_over_six']}-{rule['rng_state'] is not None}")
@pytest.mark.parametrize(("shape", "phase"), EVEN_PLACES)
def test_nvfp4(shape, phase, rule, sides):
    for name, x in inputs(shape):
        fixed, outputs = planes(x, phase, sides, "nvfp4")
        tensor_amax = torch.empty(1, 1)
        ops.tile_amax(x, phase=(0, 0), tile=(WHOLE, WHOLE), out=tensor_amax)
        fixed |= {f"{side}_tensor_amax": tensor_amax for side in sides}
        check_twins(ops.quantize_nvfp4, outputs, name, x=x, phase=phase, **rule, **fixed)
        given = amaxes(x, phase, sides)
        check_twins(ops.quantize_nvfp4, outputs, f"{name} given", x=x, phase=phase, **rule, **fixed, **given)
        if sides.keys() == {"row"}:
            by_row = torch.empty(shape[0], 1)
            ops.tile_amax(x, phase=(0, 0), tile=(1, WHOLE), out=by_row)
            fixed["row_tensor_amax"] = by_row
            check_twins(ops.quantize_nvfp4, outputs, f"{name} by row", x=x, phase=phase, **rule, **fixed)


@pytest.mark.parametrize("sides", [RUNS, SQUARES, {"col": (16, 1)}, {"col": (16, 16)}])
@pytest.mark.parametrize("state", [None, STATE, torch.stack([STATE, STATE + 5])], ids=["nearest", "one", "two"])
@pytest.mark.parametrize(("shape", "phase"), [((256, 512), (0, 0)), ((48, 546), (32, 6)), ((144, 40), (0, 10))])
def test_nvfp4_of_the_hadamard_transform(shape, phase, state, sides):
    rule = dict(phase=phase, e4m3_max=448, four_over_six="none", rng_state=state)
    for name, x in inputs(shape):
        for mask in (0, 0xD7E8):
            fixed, outputs = planes(x, phase, sides, "nvfp4")
            row_amax, col_amax = torch.empty(1, 1), torch.empty(1, 1)
            check_twins(
                ops.direction_amax, {"row_amax": row_amax, "col_amax": col_amax}, f"{name} {mask}", x=x, hadamard=mask
            )
            fixed |= {f"{s}_tensor_amax": row_amax if s == "row" else col_amax for s in sides}
            check_twins(ops.quantize_nvfp4, outputs, f"{name} {mask}", x=x, col_hadamard=mask, **rule, **fixed)


@pytest.mark.parametrize(("shape", "shift"), [((384, 512), 0), ((140, 264), 0), ((17, 515), 1), ((0, 128), 0)])
def test_direction_amax(shape, shift):
    for name, x in inputs(shape, shift):
        amaxes = {"row_amax": torch.empty(1, 1), "col_amax": torch.empty(1, 1)}
        check_twins(ops.direction_amax, amaxes, name, x=x)
        for side, amax in amaxes.items():
            check_twins(ops.direction_amax, {side: amax}, f"{side} of {name}", x=x)


def test_every_bf16_value_is_cast_alike():
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(512, 128)
    for fp8 in ("e4m3", "e5m2"):
        for exponent in range(-130, 128, 6):
            outputs = {"row_data": torch.empty(x.shape, dtype=torch.uint8)}
            scale = torch.tensor([2.0**exponent])
            check_twins(ops.quantize_float8_tensor, outputs, f"{fp8} at 2^{exponent}", x=x, scale=scale, fp8=fp8)


def test_every_bf16_value_becomes_the_same_nvfp4_code():
    """NaN of both signs included, in runs that have one and in runs given an amax."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for stride in (1, 257):  # in order, and mixed: finite values beside NaN
        mixed = x[torch.arange(2**16) * stride % 2**16].reshape(256, 256)
        fixed, outputs = planes(mixed, (0, 0), RUNS, "nvfp4")
        for exponent in range(-130, 128, 11):
            fixed |= {f"{side}_tensor_amax": torch.full((1, 1), 1.3 * 2.0**exponent) for side in RUNS}
            for rule in RULES:
                given = amaxes(mixed, (0, 0), RUNS)
                name = f"{exponent} {rule}"
                check_twins(ops.quantize_nvfp4, outputs, name, x=mixed, phase=(0, 0), **rule, **fixed)
                check_twins(ops.quantize_nvfp4, outputs, name, x=mixed, phase=(0, 0), **rule, **fixed, **given)


def test_every_fp32_value_is_rounded_to_the_nearest_nvfp4_code():
    """All 2^32 of them by a multiplier of one: codes are those that comparisons with the ties give."""
    side, step = 2**13, 2**26
    ones = torch.ones(side, side // 16, device="cuda")
    outputs = dict(
        row_tile=(1, 16),
        row_amax=ones * 6,
        row_tensor_amax=torch.full((1, 1), 6.0 * 448, device="cuda"),
        row_data=torch.empty(side, side // 2, dtype=torch.uint8, device="cuda"),
        row_scale=torch.empty(side, side // 16, dtype=torch.uint8, device="cuda"),
    )
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for first in range(-(2**31), 2**31, step):
        bits = torch.arange(first, first + step, device="cuda").to(torch.int32)
        x = bits.view(torch.float32)
        size, code = x.abs(), torch.zeros(step, dtype=torch.uint8, device="cuda")
        for upper in (0.25, 1.25, 2.5, 5.0):  # ties go to even codes: down from these, up from the others
            code += size > upper
        for lower in (0.75, 1.75, 3.5):
            code += size >= lower
        code = torch.where(x.isnan(), 7, code + 8 * (bits < 0))
        ops.quantize_nvfp4(x.view(side, side), phase=(0, 0), **RULES[0], **outputs)
        differs |= (outputs["row_data"].flatten() != code[0::2] + 16 * code[1::2]).any()
    assert not differs
