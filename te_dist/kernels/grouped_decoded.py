"""Launches of products in groups whose operands are decoded. Arguments are in the order of the ops' schemas."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from te_dist.kernels import gemm, gemm_staged
from te_dist.kernels.gemm_decoded import is_turned
from te_dist.kernels.gemm_staged import BAND, COLS, STEP, Factors, Side, height_of
from te_dist.kernels.grouped_gemm import GROUPS, ROWS_FIELDS, SUMS_FIELDS, launch_everywhere, table_values
from te_dist.kernels.runtime import record
from te_dist.kernels.spec import Layout, Spec, once

_ROWS = Layout(gemm_staged.COMMON + GROUPS + ROWS_FIELDS)
_SUMS = Layout(gemm_staged.COMMON + GROUPS + SUMS_FIELDS)
_OF_OPERAND = 5  # arguments


@once
def rows_decoded(kinds: tuple[str, ...], turned: tuple[bool, ...], height: int) -> Spec:
    """Spec of products of rows in groups."""
    return gemm_staged.staged("RowGroups", _ROWS, kinds, turned, height)


@once
def sums_decoded(kinds: tuple[str, ...], turned: tuple[bool, ...], height: int) -> Spec:
    """Spec of products that sum over the rows of groups."""
    return gemm_staged.staged("DepthGroups", _SUMS, kinds, turned, height)


def grouped_gemm_decoded(*arguments: Any) -> None:
    """See te_dist.ops.grouped_gemm_decoded."""
    table, bias, row_factor, accumulate, out = arguments[2 * _OF_OPERAND :]
    (rows, cols), groups = out.shape, table.shape[1] - 1
    if out.numel() == 0 or groups == 0:
        return
    sides, factors = _operands(arguments)
    a, b = sides
    summed = a.summed
    height = height_of(-(-rows // groups), cols, groups=groups)
    spec = rows_decoded((a.kind, b.kind), (a.turned, b.turned), height)
    if out.is_meta:
        return record(spec)
    steps = -(-summed // STEP)
    b_rows, b_summed = (0, summed) if b.turned else (cols, 0)
    tiles = (*table_values(table, height), rows, -(-cols // COLS), -(-steps // 2), b_rows, 0, BAND)
    values = gemm_staged.common(sides, height, factors, (bias, row_factor, accumulate, out))
    launch_everywhere(spec, 1, (*values, steps, b_summed, *tiles), out)


def grouped_wgrad_decoded(*arguments: Any) -> None:
    """See te_dist.ops.grouped_wgrad_decoded."""
    table, accumulate, out = arguments[2 * _OF_OPERAND :]
    (all_rows, cols), groups = out.shape, table.shape[1] - 1
    if gemm.is_trivial(arguments[0].numel(), out, accumulate=accumulate):
        return
    sides, factors = _operands(arguments)
    a, b = sides
    rows = all_rows // groups
    height = height_of(rows, cols, groups=groups)
    spec = sums_decoded((a.kind, b.kind), (a.turned, b.turned), height)
    if out.is_meta:
        return record(spec)
    extents = (a.summed // gemm.DEPTH, rows, -(-rows // height), -(-cols // COLS), BAND)
    tiles = (*table_values(table, gemm.DEPTH), *extents)
    values = gemm_staged.common(sides, height, factors, (None, None, accumulate, out))
    launch_everywhere(spec, 1, (*values, 0, 0, *tiles), out)


def _operands(arguments: tuple) -> tuple[tuple[Side, Side], Factors]:
    """Both, which have values, and their factors."""
    a, b = arguments[:_OF_OPERAND], arguments[_OF_OPERAND : 2 * _OF_OPERAND]
    sides = _side("a", *a[:3]), _side("b", *b[:3])
    return sides, (_factor(a[3]), _factor(b[3]), a[4] * b[4])


def _side(name: str, codes: Tensor, kind: str, scale: Tensor) -> Side:
    turned = is_turned(codes)
    side = Side(codes.t() if turned else codes, kind, scale.t() if turned else scale, turned)
    if not side.fits():
        raise ValueError(
            f"{name}: got codes with strides {codes.stride()} at {codes.data_ptr():#x} and scales with strides "
            f"{scale.stride()} at {scale.data_ptr():#x}, wanted rows of codes that are multiples of 16 bytes long and "
            "apart, and rows of scales of 4 apart, with room for whole words; pad what is contiguous, or copy"
        )
    return side


def _factor(factor: Tensor | None) -> tuple[int, int, int]:
    """Values of a `Factor`: one for every group, or for all."""
    return 0 if factor is None else factor.data_ptr(), 0, 0 if factor is None or factor.numel() == 1 else 1
