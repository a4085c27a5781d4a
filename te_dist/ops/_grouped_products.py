"""What products in groups have in common: checks of their arguments, and loops over groups on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from te_dist.ops._checks import HIGH_PRECISION, check_packed, check_product
from te_dist.ops.group_table import TILE, check_table


class Rows(NamedTuple):
    """How products of rows end; see the ops."""

    table: Tensor
    bias: Tensor | None
    row_factor: Tensor | None
    accumulate: bool
    out: Tensor


class GroupedFloat8Sums(TypedDict):
    """table: int32 (4, G + 1), see `group_table`.  fp8: types of `a` and `b`.

    accumulate: add to what `out` holds, in fp32; else an empty group gives zeros.
    """

    table: Tensor
    fp8: tuple[str, str]
    accumulate: bool


def check_tiles(depth: int) -> None:
    """Of FP8 that is summed over the rows of groups."""
    if depth % TILE:
        raise ValueError(f"a: got {depth} columns, wanted a multiple of {TILE}: groups are padded to tiles with zeros")


def check_summed(name: str, extent: int) -> None:
    if extent == 0:
        raise ValueError(f"{name}: got nothing to sum over, wanted at least one value; an empty sum needs no product")


def check_ends_of_rows(end: Rows, rows: int) -> None:
    """All but the operands of products of `rows`."""
    num_groups, cols = check_table(end.table), end.out.shape[-1]
    check_product(end.out, (rows, cols), end.accumulate)
    if end.bias is not None:
        check_packed("bias", end.bias, HIGH_PRECISION, (num_groups, cols))
    if end.row_factor is not None:
        check_packed("row_factor", end.row_factor, (torch.float32,), (rows,))


def in_groups(matrix: Tensor, groups: int, dim: int = 0) -> Sequence[Tensor]:
    """The matrices of `groups` groups; none of none."""
    return matrix.chunk(groups, dim) if groups else ()


def write_rows(product_of: Callable[[int, slice], Tensor], end: Rows) -> None:
    """Writes the products (fp32) of the rows of every group."""
    table, bias, row_factor, accumulate, out = end
    begins = table[0].tolist()
    for group, (first, last) in enumerate(zip(begins, begins[1:], strict=False)):
        if last <= first:
            continue
        rows = slice(first, last)
        product = product_of(group, rows)
        if bias is not None:
            product += bias[group]
        if row_factor is not None:
            product *= row_factor[rows, None]
        (out[rows].add_ if accumulate else out[rows].copy_)(product)


def write_sums(product_of: Callable[[int, slice], Tensor], begins: Tensor, accumulate: bool, out: Tensor) -> None:
    """Writes the products (fp32) that sum over each group's part, between `begins` (G + 1,)."""
    places = begins.tolist()
    for group, product in enumerate(in_groups(out, len(places) - 1)):
        (product.add_ if accumulate else product.copy_)(product_of(group, slice(*places[group : group + 2])))
