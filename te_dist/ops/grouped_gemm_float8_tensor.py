"""Products of groups of rows with a matrix of each group: FP8 with one scale for a matrix, or for each group of it."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.formats import WHOLE
from te_dist.ops._checks import check_packed, check_rows, check_types, extents, takes
from te_dist.ops._grouped_products import Rows, check_ends_of_rows, check_summed, in_groups, write_rows
from te_dist.ops._library import register
from te_dist.ops._taped import taped
from te_dist.ops.dequantize_float8 import dequantize_float8
from te_dist.ops.group_table import check_table


class GroupedFloat8Product(TypedDict):
    """table: int32 (4, G + 1), see `group_table`.  fp8: types of `a` and `b`.

    bias: (G, N) fp32, bf16 or fp16, or None.  row_factor: f32 (T,), or None, which a row of the output, bias included,
    is multiplied by before rounding.  fast: leave all of a sum to the tensor cores, which keep 14 bits of it; else they
    sum 128 values at a time, which are added in fp32.  accumulate: add to what `out` holds, in fp32.
    """

    table: Tensor
    fp8: tuple[str, str]
    fast: bool
    bias: Tensor | None
    row_factor: Tensor | None
    accumulate: bool


@taped
@takes(GroupedFloat8Product)
def grouped_gemm_float8_tensor(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out: Tensor, **product: Unpack[GroupedFloat8Product]
) -> None:
    """out[rows of g] = a[rows of g] b[g]^T, times both scales, for every group g.

    Rows behind the last group are left as they are. Rows of `a` and `b` are multiples of 16 bytes long and apart;
    groups may begin anywhere. On the CPU all sums are fp32, `fast` or not.

    Args:
        a: u8 codes (T, K), rows contiguous.
        a_scale: f32 (1,), or (G,) for one of each group.
        b: u8 codes (G * N, K).
        b_scale: f32 (1,) or (G,).
        out: (T, N) fp32, bf16 or fp16, rows contiguous; fp32 to accumulate.
        product: see `GroupedFloat8Product`.

    Raises:
        ValueError: a type, shape or address that does not fit.
    """
    fp8 = product["fp8"]
    end = Rows(product["table"], product["bias"], product["row_factor"], product["accumulate"], out)
    (rows, depth), (_, cols), groups = extents("a", a), extents("out", out), check_table(end.table)
    check_summed("a", depth)
    check_operands((a, a_scale), (b, b_scale), ((rows, depth), (groups * cols, depth)), fp8, groups)
    check_ends_of_rows(end, rows)
    torch.ops.te_dist.grouped_gemm_float8_tensor(a, a_scale, b, b_scale, end.table, fp8, product["fast"], *end[1:])


def check_operands(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], shapes: tuple, fp8: tuple[str, str], num_groups: int
) -> None:
    """Codes of these shapes, with their scales."""
    check_types(fp8)
    for name, (codes, scale), shape in zip("ab", (a, b), shapes, strict=True):
        check_rows(name, codes, (torch.uint8,), shape)
        check_packed(f"{name}_scale", scale, (torch.float32,), (1,) if scale.numel() == 1 else (num_groups,))


def values(codes: Tensor, fp8: str) -> Tensor:
    """What codes stand for, in fp32, without their scale."""
    out = torch.empty(codes.shape, dtype=torch.float32)
    dequantize_float8(codes, torch.ones(1, 1), tile=(WHOLE, WHOLE), phase=(0, 0), fp8=fp8, out=out)
    return out


def _cpu(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, table: Tensor, *rest: Any) -> None:
    fp8, _, *others = rest
    groups = table.shape[1] - 1
    left, matrices, scales = values(a, fp8[0]), in_groups(b, groups), (a_scale * b_scale).expand(groups)
    write_rows(lambda g, rows: left[rows] @ values(matrices[g], fp8[1]).t() * scales[g], Rows(table, *others))


register(
    "grouped_gemm_float8_tensor(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor table, str[] fp8, "
    "bool fast, Tensor? bias, Tensor? row_factor, bool accumulate, Tensor(a!) out) -> ()",
    _cpu,
    kernels.grouped_gemm_float8_tensor,
)
