"""Matrices of more than 2^31 elements: places are computed in 64 bits, everywhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.formats import WHOLE
from te_dist.ops.group_table import padded_rows
from te_dist.testing import assert_bitwise
from tests.gpu.catalog import Call
from tests.ops.groups import table_of
from tests.ops.whole_groups import integers, spans

pytestmark = pytest.mark.gpu

# Extents of large matrices, whose element 2^31 begins a row; rows in which results are compared.
ROWS, COLS = 33_792, 65_536
PARTS = (0, 32_640, 32_768, ROWS - 128)


def random(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, device="cuda", dtype=dtype)
    return torch.randint(0, 119, shape, device="cuda", dtype=dtype)  # finite whatever it stands for


def blank(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype).fill_(77)


F32, BF16, PLACE = torch.float32, torch.bfloat16, dict(phase=(0, 0))
ROW, COL = dict(row_data=(0, 1)), dict(col_data=(1, 1))

# A call, and for each of its tensors that are cut: along which dimension, how many rows of the matrix an index is.
Large = tuple[Call, dict[str, tuple[int, int]]]


def tensorwise() -> Large:
    inputs = dict(x=random(ROWS, COLS, dtype=BF16), scale=torch.full((1,), 3.7, device="cuda"), fp8="e4m3")
    outputs = dict(row_data=blank(ROWS, COLS), col_data=blank(COLS, ROWS))
    return Call("tensor", ops.quantize_float8_tensor, inputs, outputs), dict(x=(0, 1)) | ROW | COL


def block() -> Large:
    rule = dict(fp8="e4m3", pow2=True, eps=0.0, row_tile=(1, 128), col_tile=(128, 1))
    outputs = dict(row_data=blank(ROWS, COLS), row_scale=blank(COLS // 128, ROWS, dtype=F32).t())
    outputs |= dict(col_data=blank(COLS, ROWS), col_scale=blank(ROWS // 128, COLS, dtype=F32))
    cut = dict(x=(0, 1), row_scale=(0, 1), col_scale=(0, 128)) | ROW | COL
    inputs = dict(x=random(ROWS, COLS, dtype=BF16)) | PLACE | rule
    return Call("block", ops.quantize_float8_block, inputs, outputs), cut


def mx() -> Large:
    rule = dict(fp8="e4m3", row_tile=(1, 32), col_tile=(32, 1))
    outputs = dict(row_data=blank(ROWS, COLS), row_scale=blank(ROWS, COLS // 32))
    outputs |= dict(col_data=blank(ROWS, COLS), col_scale=blank(ROWS // 32, COLS))
    cut = dict(x=(0, 1), row_data=(0, 1), row_scale=(0, 1), col_data=(0, 1), col_scale=(0, 32))
    return Call("mx", ops.quantize_mxfp8, dict(x=random(ROWS, COLS, dtype=BF16)) | PLACE | rule, outputs), cut


def fp4() -> Large:
    amax = torch.full((1, 1), 5.0, device="cuda")
    rule = dict(e4m3_max=448, four_over_six="none", rng_state=None, row_tile=(1, 16), col_tile=(16, 1))
    rule |= dict(row_tensor_amax=amax, col_tensor_amax=amax)
    outputs = dict(row_data=blank(ROWS, COLS // 2), row_scale=blank(ROWS, COLS // 16))
    outputs |= dict(col_data=blank(COLS, ROWS // 2), col_scale=blank(ROWS // 16, COLS))
    cut = dict(x=(0, 1), row_data=(0, 1), row_scale=(0, 1), col_data=(1, 2), col_scale=(0, 16))
    return Call("fp4", ops.quantize_nvfp4, dict(x=random(ROWS, COLS, dtype=BF16)) | PLACE | rule, outputs), cut


def from_block() -> Large:
    inputs = dict(data=random(ROWS, COLS), scale=random(ROWS, COLS // 128, dtype=F32), tile=(1, 128), fp8="e4m3")
    cut = dict(data=(0, 1), scale=(0, 1), out=(0, 1))
    return Call("from block", ops.dequantize_float8, inputs | PLACE, dict(out=blank(ROWS, COLS, dtype=BF16))), cut


def from_mx() -> Large:
    inputs = dict(data=random(COLS, ROWS).t(), scale=random(ROWS // 32, COLS), grain=(32, 1), fp8="e5m2")
    cut = dict(data=(0, 1), scale=(0, 32), out=(0, 1))
    return Call("from mx", ops.dequantize_mxfp8, inputs | PLACE, dict(out=blank(ROWS, COLS, dtype=BF16))), cut


def from_fp4() -> Large:
    inputs = dict(data=random(COLS, ROWS // 2), scale=random(ROWS // 16, COLS), amax=torch.ones(1, 1, device="cuda"))
    inputs |= dict(packed_dim=0, e4m3_max=448) | PLACE
    cut = dict(data=(1, 2), scale=(0, 16), out=(0, 1))
    return Call("from fp4", ops.dequantize_nvfp4, inputs, dict(out=blank(ROWS, COLS, dtype=BF16))), cut


def turned(bits: int, dtype: torch.dtype) -> Large:
    pack = 2 if bits == 4 else 1
    src, out = random(ROWS, COLS // pack, dtype=dtype), blank(COLS, ROWS // pack, dtype=dtype)
    return Call(f"turn {bits}", ops.transpose, dict(src=src, bits=bits), dict(out=out)), dict(src=(0, 1), out=(1, pack))


def hadamard() -> Large:
    inputs = dict(x=random(ROWS, COLS, dtype=BF16), sign_mask=3)
    return Call("hadamard", ops.hadamard, inputs, dict(out=blank(ROWS, COLS, dtype=BF16))), dict(x=(0, 1), out=(0, 1))


def amax() -> Large:
    inputs = dict(x=random(ROWS, COLS, dtype=BF16), tile=(1, 128)) | PLACE
    return Call("amax", ops.tile_amax, inputs, dict(out=blank(ROWS, COLS // 128, dtype=F32))), dict(
        x=(0, 1), out=(0, 1)
    )


MAKERS = {make.__name__: make for make in (tensorwise, block, mx, fp4, from_block, from_mx, from_fp4, hadamard, amax)}
KINDS = ((4, torch.uint8), (8, torch.uint8), (16, BF16), (32, F32))
MAKERS |= {f"turned {bits}": partial(turned, bits, dtype) for bits, dtype in KINDS}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_matrices_of_more_than_2_31_elements(make):
    torch.cuda.empty_cache()
    call, cut = make()
    call.run()
    for start in PARTS:

        def part(name: str, value: Any, start: int = start) -> Any:
            dim, rows = cut.get(name, (0, 0))
            return value.narrow(dim, start // rows, 128 // rows) if rows else value

        inputs = {name: part(name, value) for name, value in call.inputs.items()}
        inputs = {name: v.cpu().contiguous() if isinstance(v, Tensor) else v for name, v in inputs.items()}
        got = {name: part(name, output).cpu() for name, output in call.outputs.items()}
        want = {name: torch.empty_like(output.contiguous()) for name, output in got.items()}
        call.op(**inputs, **want)
        for name, expected in want.items():
            assert_bitwise(got[name].contiguous(), expected, f"{name} of {call.name} from row {start}")


def test_a_matrix_of_more_than_2_31_elements_is_assembled():
    torch.cuda.empty_cache()
    halves = [random(ROWS // 2, COLS), random(ROWS // 2, COLS)]
    out = blank(ROWS, COLS)
    ops.assemble(halves, row_starts=[0, ROWS // 2], col_starts=[0, 0], out=out)
    assert all(torch.equal(half, out[i * ROWS // 2 : (i + 1) * ROWS // 2]) for i, half in enumerate(halves))


def test_one_amax_of_more_than_2_31_elements():
    torch.cuda.empty_cache()
    x, out = random(ROWS, COLS, dtype=torch.bfloat16), blank(1, 1, dtype=torch.float32)
    x[-1, -1] = 1000.0
    ops.tile_amax(x, phase=(0, 0), tile=(WHOLE, WHOLE), out=out)
    assert out.item() == 1000.0


SIZES = [20_000, 5, ROWS - 20_005]  # of groups


def test_groups_of_more_than_2_31_elements_are_quantized():
    torch.cuda.empty_cache()
    padded, rule = padded_rows(ROWS, len(SIZES)), dict(fp8="e4m3", pow2=True, eps=0.0)
    rule |= dict(row_tile=(1, 128), col_tile=(128, 1))
    x, table = random(ROWS, COLS, dtype=BF16), table_of(SIZES, ROWS, "cuda")
    codes = blank(ROWS, COLS), blank(COLS, padded)
    scales = blank(COLS // 128, ROWS, dtype=F32), blank(padded // 128, COLS, dtype=F32)
    outputs = dict(row_data=codes[0], row_scale=scales[0], col_data=codes[1], col_scale=scales[1])
    ops.grouped_quantize_float8_block(x, table=table, **rule, **outputs)
    for (_, rows), first in zip(spans(SIZES), table[1].tolist(), strict=False):
        size, tiles = rows.stop - rows.start, -(-(rows.stop - rows.start) // 128)
        want = dict(row_data=blank(size, COLS), row_scale=blank(COLS // 128, size, dtype=F32).t())
        want |= dict(col_data=blank(COLS, size), col_scale=blank(tiles, COLS, dtype=F32))
        ops.quantize_float8_block(x[rows], **PLACE, **rule, **want)
        assert torch.equal(codes[0][rows], want["row_data"])
        assert torch.equal(scales[0][:, rows].t(), want["row_scale"])
        assert torch.equal(codes[1][:, first * 128 : first * 128 + size], want["col_data"])
        assert torch.equal(scales[1][first : first + tiles], want["col_scale"])


@pytest.mark.parametrize("cols", (COLS, COLS - 1))  # by the copy engine, and by threads
def test_products_in_groups_of_more_than_2_31_elements(cols):
    torch.cuda.empty_cache()
    a, b = (integers((extent, 128), seed, "cuda").bfloat16() for seed, extent in enumerate((ROWS, 3 * cols)))
    out, rest = blank(ROWS, cols, dtype=BF16), dict(bias=None, row_factor=None, accumulate=False)
    ops.grouped_gemm_half(a, b, table=table_of(SIZES, ROWS, "cuda"), summed_dim=1, out=out, **rest)
    for start in PARTS:
        matrix = b.chunk(3)[0 if start < SIZES[0] else 2].float()
        assert torch.equal(out[start : start + 128], (a[start : start + 128].float() @ matrix.t()).bfloat16())


def test_sums_over_groups_of_more_than_2_31_elements():
    torch.cuda.empty_cache()
    sizes, rows = [100, 0, 100, 5, 51], 8192
    a, b = (integers((256, extent), seed, "cuda").bfloat16() for seed, extent in enumerate((rows, COLS)))
    out = blank(len(sizes) * rows, COLS, dtype=BF16)
    ops.grouped_wgrad_half(a, b, table=table_of(sizes, 256, "cuda"), accumulate=False, out=out)
    for group, its in spans(sizes):
        want = (a[its].float().t() @ b[its].float()).bfloat16()
        assert torch.equal(out[group * rows : (group + 1) * rows], want), f"group {group}"
