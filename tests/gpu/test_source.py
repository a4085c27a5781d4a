"""What CUDA kernels compute in front of their own work, against the CPU's, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.formats import WHOLE
from te_dist.kernels import sources as csrc
from te_dist.ops._checks import grid_shape
from te_dist.ops.source import SwiGlu, SwiGluGradient, sums_shape
from tests.codecs.kernel_inputs import DTYPES, KINDS, matrix
from tests.gpu.test_quantize import RUNS, SQUARES, STATE, planes
from tests.gpu.twins import check_twins, shifted
from tests.ops.sources import Case, Pair, cases, sums_of, with_sums

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
# Whole panels and ragged ones, halves that end inside of eight columns, single rows and columns, nothing; elements
# between the start of every storage and its tensor.
PLACES = [((256, 512), 0), ((140, 264), 0), ((130, 36), 0), ((1, 514), 1), ((260, 2), 3), ((0, 128), 0), ((128, 0), 0)]
FEW = [((256, 512), 0), ((140, 256), 0), ((140, 70), 0), ((130, 36), 1)]
MATRICES = [*((*place, BF16) for place in FEW), *((*FEW[2], dtype) for dtype in DTYPES if dtype != BF16)]


def placed(case: Case, shift: int) -> Case:
    return case._replace(tensors={name: shifted(tensor, shift) for name, tensor in case.tensors.items()})


def check(op, outputs: dict[str, Tensor], case: Case, **rule) -> None:
    """`op` of the source on both devices; with sums among the outputs, of the source with these."""

    def of_tensors(**arguments):
        source = case.make(**{name: arguments.pop(name) for name in case.tensors})
        sums = {name: arguments.pop(name) for name in ("sums", "row_sums") if name in arguments}
        op(with_sums(source, **sums), **arguments)

    check_twins(of_tensors, outputs, case.name, **case.tensors, **rule)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "shift"), PLACES)
def test_values(shape, shift, dtype):
    for kind in KINDS:
        for case in cases(shape, dtype, kind):
            outputs = {"out": shifted(torch.zeros(shape, dtype=dtype), shift), **sums_of(case.source)}
            check(ops.evaluate, outputs, placed(case, shift))


def test_every_bf16_gate():
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16).reshape(512, 128)
    for up in (1.0, -0.37, 2.0**-130):
        x = torch.cat([gate, torch.full_like(gate, up)], 1)
        check(ops.evaluate, {"out": torch.empty_like(gate)}, Case("swiglu", SwiGlu, {"x": x}))
        grad = torch.full_like(gate, 1.7)
        case = Case("gradient", SwiGluGradient, {"x": x, "grad": grad})
        check(ops.evaluate, {"out": torch.empty_like(x)}, case)


def test_fp32_gates():
    gate = torch.linspace(-90, 90, 2**22).reshape(2048, 2048)
    x = torch.cat([gate, torch.ones_like(gate)], 1)
    check(ops.evaluate, {"out": torch.empty_like(gate)}, Case("swiglu", SwiGlu, {"x": x}))


@pytest.mark.parametrize("tile", [(WHOLE, WHOLE), (1, WHOLE), (128, 128)])
@pytest.mark.parametrize(("shape", "shift"), FEW)
def test_tile_amax(tile, shape, shift):
    for kind in ("normal", "special"):
        for case in cases(shape, BF16, kind):
            check(
                ops.tile_amax,
                {"out": torch.empty(grid_shape(shape, (0, 0), tile))},
                placed(case, shift),
                phase=(0, 0),
                tile=tile,
            )


def of_run(length: int) -> list[dict]:
    runs, squares = {"row": (1, length), "col": (length, 1)}, {"row": (length, length), "col": (length, length)}
    return [runs, squares, {"row": (1, length)}]


def in_turn(shape: Pair, dtype: torch.dtype, rules: list[tuple]) -> Iterator[tuple]:
    """Every source with one of the `rules`: a kind, and what else belongs to it. Matrices in `FEW` turn differently."""
    of_kinds = [cases(shape, dtype, kind) for kind, *_ in rules]
    for number, found in enumerate(zip(*of_kinds, strict=True)):
        turn = (number + shape[1]) % len(rules)
        yield found[turn], *rules[turn][1:]


@pytest.mark.parametrize(("shape", "shift", "dtype"), MATRICES)
def test_float8_block(shape, shift, dtype):
    rules = list(zip(("normal", "special", "wide"), of_run(128), strict=True))
    for case, sides in in_turn(shape, dtype, rules):
        fixed, outputs = planes(torch.empty(shape), (0, 0), sides, "block")
        rule = dict(phase=(0, 0), fp8="e4m3", pow2=False, eps=0.0)
        check(ops.quantize_float8_block, outputs, placed(case, shift), **rule, **fixed)


@pytest.mark.parametrize(("shape", "shift", "dtype"), MATRICES)
def test_mxfp8(shape, shift, dtype):
    rules = list(zip(("normal", "special", "wide"), of_run(32), strict=True))
    for case, sides in in_turn(shape, dtype, rules):
        fixed, outputs = planes(torch.empty(shape), (0, 0), sides, "mx")
        outputs |= sums_of(case.source)
        check(ops.quantize_mxfp8, outputs, placed(case, shift), phase=(0, 0), fp8="e4m3", **fixed)


@pytest.mark.parametrize(("shape", "shift"), FEW)
def test_nvfp4(shape, shift):
    rules = [("normal", RUNS, None), ("special", SQUARES, None), ("normal", RUNS, STATE)]
    for case, sides, state in in_turn(shape, BF16, rules):
        fixed, outputs = planes(torch.empty(shape), (0, 0), sides, "nvfp4")
        outputs |= sums_of(case.source)
        amax = torch.full((1, 1), 5.0)
        rule = dict(phase=(0, 0), e4m3_max=448, four_over_six="none", rng_state=state)
        rule |= dict(row_tensor_amax=amax, col_tensor_amax=amax)
        check(ops.quantize_nvfp4, outputs, placed(case, shift), **rule, **fixed)


@pytest.mark.parametrize(("shape", "shift", "dtype"), MATRICES)
def test_float8_tensor(shape, shift, dtype):
    for kind in ("normal", "special"):
        for case in cases(shape, dtype, kind):
            outputs = {
                "row_data": torch.empty(shape, dtype=torch.uint8),
                "col_data": torch.empty(shape[::-1], dtype=torch.uint8),
                **sums_of(case.source),
            }
            scale = torch.tensor([3.7])
            check(ops.quantize_float8_tensor, outputs, placed(case, shift), scale=scale, fp8="e5m2")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "shift"), [*PLACES, ((700, 1030), 0)])
def test_panel_sums(shape, shift, dtype):
    for kind in KINDS:
        x = shifted(matrix(kind, shape, dtype), shift)
        check_twins(ops.panel_sums, {"out": torch.empty(sums_shape(x))}, kind, x=x)
        if shape[0]:
            outputs = {"row_data": torch.empty(shape, dtype=torch.uint8), "sums": torch.empty(sums_shape(x))}
            check(
                ops.quantize_float8_tensor, outputs, Case(kind, lambda x: x, {"x": x}), scale=torch.ones(1), fp8="e4m3"
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "shift"), [*PLACES, ((33, 9000), 0), ((5, 771), 1)])
def test_rms_rstd(shape, shift, dtype):
    for kind in KINDS:
        if shape[1]:
            x = shifted(matrix(kind, shape, dtype), shift)
            check_twins(ops.rms_rstd, {"out": torch.empty(shape[0])}, kind, x=x, eps=1e-5)


def test_reciprocals_are_rounded_to_nearest():
    cupy = pytest.importorskip("cupy")
    code = """
#include "numerics/platform.h"
extern "C" __global__ void count(unsigned* wrong) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  const float value = te_dist::float_of(0x3F800000u + i);
  if (te_dist::bits_of(te_dist::reciprocal_below_one(value)) != te_dist::bits_of(__frcp_rn(value))) atomicAdd(wrong, 1);
}
"""
    options = ("--std=c++17", "--fmad=false", f"--include-path={csrc.folder()}")
    wrong = cupy.zeros(1, dtype="uint32")
    cupy.RawModule(code=code, options=options).get_function("count")((2**15 + 1,), (256,), (wrong,))
    assert int(wrong[0]) == 0
