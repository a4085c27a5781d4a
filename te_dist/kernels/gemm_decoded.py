"""Launches of products whose operands are decoded on their way to tensor cores."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from te_dist.formats.region import Pair
from te_dist.kernels import gemm_staged
from te_dist.kernels.arguments import access_bytes, pointer
from te_dist.kernels.gemm_staged import BITS, ELEMENTS_OF, ENOUGH_TILES, FLOAT_TYPES, PATCHES, Side, height_of
from te_dist.kernels.runtime import launch, multiprocessors, record
from te_dist.kernels.spec import Layout, Spec, once

HEIGHT, WIDTHS = 128, (256, 128)  # of a tile: rows, columns
SCALED_SUM = 128  # summed values of an fp32 scale
_CHUNK = 16  # codes that are read together
_ROW = 128  # bytes of a row in a buffer
_ALIGNMENT = 1024  # of the buffers
_OPERAND = (
    "codes:P pitch:q kept:q scales:P scale_kept:q scale_summed:q tile:q phase:q factor:P factor_stride:q constant:d"
)
_LAYOUT = Layout(
    " ".join(f"{side}.{field}" for side in "ab" for field in _OPERAND.split())
    + " summed:q shift:q out:P pitch:q bias:P bias_type:i out_type:i adds:i fours_fit:i"
)


@cache
def source(kind: str, grain: int, turned: bool, load: int) -> str:
    """What the kernel is told of an operand: summed values of a scale byte (0: none), bytes it can read at a time."""
    scaling = "kNone" if not grain else "kFloats" if kind == "e2m1" else "kPowers"
    along = "kKept" if turned else "kSummed"
    return f"Source<{ELEMENTS_OF[kind]}, Scaling::{scaling}, {max(1, grain)}, Along::{along}, {load}>"


@once
def decoded(a: str, b: str, half: str, width: int, scaled_sums: bool) -> Spec:
    """Spec of a product of two sources in bf16 or fp16, `half`."""
    template = f"GemmDecoded<{a}, {b}, HalfType::k{ELEMENTS_OF[half]}, {width}, {str(scaled_sums).lower()}>"
    stages = 4 if width == WIDTHS[0] else 6
    scales = 4 * (HEIGHT + width) * (stages if scaled_sums else 1)
    shared = stages * ((HEIGHT + width) * _ROW + 16) + PATCHES + scales + _ALIGNMENT
    return Spec("gemm_decoded.cuh", template, _LAYOUT, shared_bytes=shared, arch="sm_90a")


def half_of(*operands: tuple[str, int]) -> str:
    """Type that holds the values of operands (kind, grain): fp16 where no power of two is folded into them."""
    powers = any(grain and kind != "e2m1" for kind, grain in operands)
    return "bfloat16" if powers or "bfloat16" in (kind for kind, _ in operands) else "float16"


def width_of(rows: int, cols: int, scaled_sums: bool) -> int:
    """Columns of a tile: the larger where there are enough tiles for all processors, and registers."""
    few = -(-rows // HEIGHT) * -(-cols // WIDTHS[0]) < ENOUGH_TILES
    return WIDTHS[1] if few or scaled_sums else WIDTHS[0]


def gemm_decoded(*arguments: Any) -> None:
    """See te_dist.ops.gemm_decoded."""
    a, b, (summed, shift, bias, accumulate, out) = arguments[:7], arguments[7:14], arguments[14:]
    if out.numel() == 0:
        return
    rows, cols = out.shape
    sides = [(a[1], _grain(a[2], a[3])), (b[1], _grain(b[2], b[3]))]
    scaled_sums = _applies_to_sums(a[2]) or _applies_to_sums(b[2])
    width = width_of(rows, cols, scaled_sums)
    if shift == 0 and summed and all(grain for _, grain in sides):
        staged = _staged(a), _staged(b)
        if all(side.fits() for side in staged):
            factors = _factor(a[5]), _factor(b[5]), a[6] * b[6]
            target = (bias, None, accumulate, out)
            return gemm_staged.multiply(staged, height_of(rows, cols), summed, factors, target)
    (a_source, a_view), (b_source, b_view) = (
        _operand(side, kept, summed, shift) for side, kept in ((a, rows), (b, cols))
    )
    spec = decoded(a_source, b_source, half_of(*sides), width, scaled_sums)
    if out.is_meta:
        return record(spec)
    four = 4 * out.element_size()
    fours_fit = access_bytes(four, out.data_ptr(), out.stride(0) * out.element_size()) == four
    bias_type = FLOAT_TYPES[torch.float32 if bias is None else bias.dtype]
    target = (out.data_ptr(), out.stride(0), pointer(bias), bias_type, FLOAT_TYPES[out.dtype], accumulate, fours_fit)
    tiles = -(-rows // HEIGHT) * -(-cols // width)
    grid = (min(tiles, multiprocessors(out.get_device())), 1)
    launch(spec, out, grid, (*a_view, *b_view, summed, shift, *target))


def _applies_to_sums(scale: Tensor | None) -> bool:
    return scale is not None and scale.dtype == torch.float32


def _grain(scale: Tensor | None, tile: Pair) -> int:
    """Summed values of a scale byte; 0 where there are none."""
    return 0 if scale is None or _applies_to_sums(scale) else tile[1]


def is_turned(codes: Tensor) -> bool:
    """Whether the kept dimension of a (kept, summed) view is the contiguous one."""
    return codes.shape[1] > 1 and codes.stride(1) != 1


def _staged(operand: tuple) -> Side:
    codes, kind, scale = operand[:3]
    turned = is_turned(codes)
    return Side(codes.t() if turned else codes, kind, scale.t() if turned else scale, turned)


def _factor(factor: Tensor | None) -> tuple[int, int, int]:
    """Values of a `Factor`: one for every kept value, or for all."""
    return pointer(factor), 0 if factor is None or factor.numel() == 1 else factor.stride(0), 0


def _operand(operand: tuple, kept: int, summed: int, shift: int) -> tuple[str, tuple[int | float, ...]]:
    """(source, values of an OperandView)."""
    codes, kind, scale, tile, phase, factor, constant = operand
    turned = is_turned(codes)
    pitch = codes.stride(0 if not turned else 1) * codes.element_size()
    places = [codes.data_ptr(), pitch, (kept if turned else summed) * BITS[kind] // 8]
    places += [] if turned else [shift * BITS[kind] // 8]
    scales = (0, 0, 0, 0, 0)
    if scale is not None:
        strides = [step if extent > 1 else 0 for step, extent in zip(scale.stride(), scale.shape, strict=True)]
        is_fp32 = _applies_to_sums(scale)
        scales = (scale.data_ptr(), *strides, tile[0] if is_fp32 else 0, phase[0] % tile[0])
        places += [scale.data_ptr(), strides[1]] if turned and not is_fp32 else []
    wide = min(16, _CHUNK * BITS[kind] // 8)
    load = wide if access_bytes(wide, *places) == wide else codes.element_size()
    per_value = 0 if factor is None or factor.numel() == 1 else factor.stride(0)
    view = (codes.data_ptr(), pitch, kept, *scales, pointer(factor), per_value, constant)
    return source(kind, _grain(scale, tile), turned, load), view
