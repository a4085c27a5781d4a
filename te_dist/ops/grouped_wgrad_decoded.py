"""Products that sum over the rows of each group: codes with scale bytes, MXFP8 or NVFP4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.ops._checks import check_product
from te_dist.ops._grouped_products import write_sums
from te_dist.ops._library import register
from te_dist.ops._taped import taped
from te_dist.ops.gemm_decoded import Coded
from te_dist.ops.group_table import TILE, check_table
from te_dist.ops.grouped_gemm_decoded import check_operand, factor_of, flat, values


@taped
def grouped_wgrad_decoded(a: Coded, b: Coded, *, table: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """out[g] = a[:, tiles of g] b[:, tiles of g]^T for every group g, decoded and summed as `gemm_decoded` does it.

    What is summed over, the rows of each group, begins at a tile of 128 of its own, in the order of groups and without
    a gap between tiles; codes behind a group's last row, up to the end of its tile, are zero. Either dimension may be
    the contiguous one: MXFP8 by columns lies in the order of rows, NVFP4 transposed. Operands are those of
    `grouped_gemm_decoded` otherwise.

    Args:
        a: (M, P); P a multiple of 128.
        b: (N, P).
        table: int32 (4, G + 1), see `group_table`.
        out: (G * M, N) fp32, bf16 or fp16, rows contiguous; fp32 to accumulate.
        accumulate: add to what `out` holds, in fp32; else an empty group gives zeros.

    Raises:
        ValueError: a type, shape or address that does not fit.
    """
    groups = check_table(table)
    check_operand("a", a, groups)
    check_operand("b", b, groups)
    (rows, depth), (cols, also_depth) = a.shape, b.shape
    if depth % TILE or depth != also_depth:
        raise ValueError(
            f"a, b: got {depth} and {also_depth} values to sum over, wanted the same multiple of {TILE}: groups are "
            "padded to tiles with zeros"
        )
    check_product(out, (groups * rows, cols), accumulate)
    torch.ops.te_dist.grouped_wgrad_decoded(*flat(a), *flat(b), table, accumulate, out)


def _cpu(*arguments: Any) -> None:
    a, b, (table, accumulate, out) = arguments[:5], arguments[5:10], arguments[10:]
    left, right = values(*a[:3]), values(*b[:3])

    def product_of(group: int, columns: slice) -> Tensor:
        return left[:, columns] @ right[:, columns].t() * factor_of(group, a, b)

    write_sums(product_of, table[1] * TILE, accumulate, out)


register(
    "grouped_wgrad_decoded(Tensor a, str a_kind, Tensor a_scale, Tensor? a_factor, float a_constant, "
    "Tensor b, str b_kind, Tensor b_scale, Tensor? b_factor, float b_constant, "
    "Tensor table, bool accumulate, Tensor(a!) out) -> ()",
    _cpu,
    kernels.grouped_wgrad_decoded,
)
