"""Products that sum over the rows of each group: FP8 with one scale for a matrix, or for each group of it."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.ops._checks import check_product, extents, takes
from te_dist.ops._grouped_products import GroupedFloat8Sums, check_tiles, write_sums
from te_dist.ops._library import register
from te_dist.ops._taped import taped
from te_dist.ops.group_table import TILE, check_table
from te_dist.ops.grouped_gemm_float8_tensor import check_operands, values


@taped
@takes(GroupedFloat8Sums)
def grouped_wgrad_float8_tensor(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out: Tensor, **product: Unpack[GroupedFloat8Sums]
) -> None:
    """out[g] = a[:, tiles of g] b[:, tiles of g]^T, times both scales, for every group g.

    Operands lie transposed. The rows of each group begin at a tile of 128 columns of their own, in the order of groups
    and without a gap between tiles; codes behind a group's last row, up to the end of its tile, are zero. On CUDA
    tensor cores sum 128 values at a time, which are added in fp32.

    Args:
        a: u8 codes (M, P), rows contiguous; P a multiple of 128.
        a_scale: f32 (1,), or (G,) for one of each group.
        b: u8 codes (N, P).
        b_scale: f32 (1,) or (G,).
        out: (G * M, N) fp32, bf16 or fp16, rows contiguous; fp32 to accumulate.
        product: see `GroupedFloat8Sums`.

    Raises:
        ValueError: a type, shape or address that does not fit.
    """
    table, fp8, accumulate = product["table"], product["fp8"], product["accumulate"]
    (rows, depth), (cols, _), groups = extents("a", a), extents("b", b), check_table(table)
    check_tiles(depth)
    check_operands((a, a_scale), (b, b_scale), ((rows, depth), (cols, depth)), fp8, groups)
    check_product(out, (groups * rows, cols), accumulate)
    torch.ops.te_dist.grouped_wgrad_float8_tensor(a, a_scale, b, b_scale, table, fp8, accumulate, out)


def _cpu(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, table: Tensor, *rest: Any) -> None:
    fp8, accumulate, out = rest
    left, right, scales = values(a, fp8[0]), values(b, fp8[1]), (a_scale * b_scale).expand(table.shape[1] - 1)
    write_sums(lambda g, its: left[:, its] @ right[:, its].t() * scales[g], table[1] * TILE, accumulate, out)


register(
    "grouped_wgrad_float8_tensor(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor table, str[] fp8, "
    "bool accumulate, Tensor(a!) out) -> ()",
    _cpu,
    kernels.grouped_wgrad_float8_tensor,
)
