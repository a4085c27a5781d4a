"""Products that sum over the rows of each group, in bf16 or fp16."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.ops._checks import check_product, check_rows, extents
from te_dist.ops._grouped_products import write_sums
from te_dist.ops._library import register
from te_dist.ops._taped import taped
from te_dist.ops.group_table import check_table
from te_dist.ops.grouped_gemm_half import HALVES


@taped
def grouped_wgrad_half(a: Tensor, b: Tensor, *, table: Tensor, accumulate: bool, out: Tensor) -> None:
    """out[g] = a[rows of g]^T b[rows of g] for every group g.

    Operands lie as they are multiplied elsewhere; groups may begin at any row. Rows of `a` and `b` are multiples of 16
    bytes long and apart. No value of a row that is not the group's matters, not even one that is not a number.

    Args:
        a: bf16 or fp16 (T, M), rows contiguous.
        b: (T, N), of the type of `a`.
        table: int32 (4, G + 1), see `group_table`.
        accumulate: add to what `out` holds, in fp32; else an empty group gives zeros.
        out: (G * M, N) fp32, bf16 or fp16, rows contiguous; fp32 to accumulate.

    Raises:
        ValueError: a type, shape or address that does not fit.
    """
    (depth, rows), (_, cols), groups = extents("a", a), extents("b", b), check_table(table)
    check_rows("a", a, HALVES, (depth, rows))
    check_rows("b", b, (a.dtype,), (depth, cols))
    check_product(out, (groups * rows, cols), accumulate)
    torch.ops.te_dist.grouped_wgrad_half(a, b, table, accumulate, out)


def _cpu(a: Tensor, b: Tensor, table: Tensor, accumulate: bool, out: Tensor) -> None:
    write_sums(lambda _, its: a[its].float().t() @ b[its].float(), table[0], accumulate, out)


register(
    "grouped_wgrad_half(Tensor a, Tensor b, Tensor table, bool accumulate, Tensor(a!) out) -> ()",
    _cpu,
    kernels.grouped_wgrad_half,
)
