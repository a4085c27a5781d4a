"""Products of groups of rows with a matrix of each group, in bf16 or fp16."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.ops._checks import check_choice, check_rows, extents, takes
from te_dist.ops._grouped_products import Rows, check_ends_of_rows, check_summed, in_groups, write_rows
from te_dist.ops._library import register
from te_dist.ops._taped import taped
from te_dist.ops.group_table import check_table

HALVES = (torch.bfloat16, torch.float16)


class GroupedHalfProduct(TypedDict):
    """table: int32 (4, G + 1), see `group_table`.  summed_dim: of each group's matrix in `b`, 0 or 1.

    bias: (G, N) fp32, bf16 or fp16, or None.  row_factor: f32 (T,), or None, which a row of the output, bias included,
    is multiplied by before rounding.  accumulate: add to what `out` holds, in fp32.
    """

    table: Tensor
    summed_dim: int
    bias: Tensor | None
    row_factor: Tensor | None
    accumulate: bool


@taped
@takes(GroupedHalfProduct)
def grouped_gemm_half(a: Tensor, b: Tensor, *, out: Tensor, **product: Unpack[GroupedHalfProduct]) -> None:
    """out[rows of g] = a[rows of g] b[g]^T for every group g, or a[rows of g] b[g] where `summed_dim` is 0.

    Rows behind the last group are left as they are. Rows of `a` and `b` are multiples of 16 bytes long and apart;
    groups may begin anywhere. Sums are fp32, in the order of the tensor cores.

    Args:
        a: bf16 or fp16 (T, K), rows contiguous.
        b: (G * N, K), or (G * K, N) where `summed_dim` is 0; of the type of `a`.
        out: (T, N) fp32, bf16 or fp16, rows contiguous; fp32 to accumulate.
        product: see `GroupedHalfProduct`.

    Raises:
        ValueError: a type, shape or address that does not fit.
    """
    summed_dim = product["summed_dim"]
    end = Rows(product["table"], product["bias"], product["row_factor"], product["accumulate"], out)
    check_choice("summed_dim", summed_dim, (0, 1))
    (rows, depth), (_, cols), groups = extents("a", a), extents("out", out), check_table(end.table)
    check_summed("a", depth)
    check_rows("a", a, HALVES, (rows, depth))
    check_rows("b", b, (a.dtype,), (groups * cols, depth) if summed_dim == 1 else (groups * depth, cols))
    check_ends_of_rows(end, rows)
    torch.ops.te_dist.grouped_gemm_half(a, b, end.table, summed_dim, *end[1:])


def _cpu(a: Tensor, b: Tensor, table: Tensor, summed_dim: int, *rest: Any) -> None:
    matrices = in_groups(b, table.shape[1] - 1)

    def product_of(group: int, rows: slice) -> Tensor:
        matrix = matrices[group].float()
        return a[rows].float() @ (matrix.t() if summed_dim == 1 else matrix)

    write_rows(product_of, Rows(table, *rest))


register(
    "grouped_gemm_half(Tensor a, Tensor b, Tensor table, int summed_dim, Tensor? bias, Tensor? row_factor, "
    "bool accumulate, Tensor(a!) out) -> ()",
    _cpu,
    kernels.grouped_gemm_half,
)
