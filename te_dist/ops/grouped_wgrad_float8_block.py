"""Products that sum over the rows of each group: FP8 with fp32 scales for 128 of them."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.ops._checks import check_product, check_rows, check_types, extents, takes
from te_dist.ops._grouped_products import GroupedFloat8Sums, check_tiles, write_sums
from te_dist.ops._library import register
from te_dist.ops._taped import taped
from te_dist.ops.group_table import TILE, check_table
from te_dist.ops.grouped_gemm_float8_block import values


@taped
@takes(GroupedFloat8Sums)
def grouped_wgrad_float8_block(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out: Tensor, **product: Unpack[GroupedFloat8Sums]
) -> None:
    """out[g] = a[:, tiles of g] b[:, tiles of g]^T for every group g, each code times its scale.

    Operands lie transposed. The rows of each group begin at a tile of 128 columns of their own, in the order of groups
    and without a gap between tiles; codes behind a group's last row, up to the end of its tile, are zero.

    Args:
        a: u8 codes (M, P), rows contiguous; P a multiple of 128.
        a_scale: f32 (P / 128, at least M): one for a row of 128 values.
        b: u8 codes (N, P).
        b_scale: f32 (P / 128, at least N).
        out: (G * M, N) fp32, bf16 or fp16, rows contiguous; fp32 to accumulate.
        product: see `GroupedFloat8Sums`.

    Raises:
        ValueError: a type, shape or address that does not fit.
    """
    table, fp8, accumulate = product["table"], product["fp8"], product["accumulate"]
    check_types(fp8)
    (rows, depth), (cols, _), groups = extents("a", a), extents("b", b), check_table(table)
    check_tiles(depth)
    check_rows("a", a, (torch.uint8,), (rows, depth))
    check_rows("b", b, (torch.uint8,), (cols, depth))
    check_rows("a_scale", a_scale, (torch.float32,), (depth // TILE, rows), at_least=True)
    check_rows("b_scale", b_scale, (torch.float32,), (depth // TILE, cols), at_least=True)
    check_product(out, (groups * rows, cols), accumulate)
    torch.ops.te_dist.grouped_wgrad_float8_block(a, a_scale, b, b_scale, table, fp8, accumulate, out)


def _cpu(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, table: Tensor, *rest: Any) -> None:
    fp8, accumulate, out = rest
    left, right = values(a, a_scale, (1, TILE), fp8[0]), values(b, b_scale, (1, TILE), fp8[1])
    write_sums(lambda _, its: left[:, its] @ right[:, its].t(), table[1] * TILE, accumulate, out)


register(
    "grouped_wgrad_float8_block(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor table, str[] fp8, "
    "bool accumulate, Tensor(a!) out) -> ()",
    _cpu,
    kernels.grouped_wgrad_float8_block,
)
