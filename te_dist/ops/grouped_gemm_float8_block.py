"""Products of groups of rows with a matrix of each group: FP8 with fp32 scales for 128 values that are summed over."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.formats.region import Pair
from te_dist.ops._checks import check_choice, check_rows, check_types, extents, takes
from te_dist.ops._grouped_products import Rows, check_ends_of_rows, check_summed, in_groups, write_rows
from te_dist.ops._library import register
from te_dist.ops._taped import taped
from te_dist.ops.dequantize_float8 import dequantize_float8
from te_dist.ops.group_table import TILE, check_table


class GroupedFloat8BlockProduct(TypedDict):
    """table: int32 (4, G + 1), see `group_table`.  summed_dim: of each group's matrix in `b`; 0 for squares only.

    b_tile: (rows, cols) of `b` that share a scale, (1, 128) or (128, 128).  fp8: types of `a` and `b`.
    bias: (G, N) fp32, bf16 or fp16, or None.  row_factor: f32 (T,), or None, which a row of the output, bias included,
    is multiplied by before rounding.  accumulate: add to what `out` holds, in fp32.
    """

    table: Tensor
    summed_dim: int
    b_tile: Pair
    fp8: tuple[str, str]
    bias: Tensor | None
    row_factor: Tensor | None
    accumulate: bool


@taped
@takes(GroupedFloat8BlockProduct)
def grouped_gemm_float8_block(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out: Tensor, **product: Unpack[GroupedFloat8BlockProduct]
) -> None:
    """out[rows of g] = a[rows of g] b[g]^T for every group g, or a[rows of g] b[g] where `summed_dim` is 0; each code
    times its scale.

    Rows behind the last group are left as they are. Rows of `a`, `b` and the scales are multiples of 16 bytes long and
    apart; groups may begin anywhere.

    Args:
        a: u8 codes (T, K), rows contiguous.
        a_scale: f32 (ceil(K / 128), at least T): one for a row of 128 values.
        b: u8 codes (G * N, K), or (G * K, N) where `summed_dim` is 0, K a multiple of 128.
        b_scale: f32 (G * ceil(K / 128), at least N), or (G * ceil(N / 128), at least ceil(K / 128)) for squares, or
            (G * K / 128, at least ceil(N / 128)) where `summed_dim` is 0; members lie one below the other, without rows
            between them.
        out: (T, N) fp32, bf16 or fp16, rows contiguous; fp32 to accumulate.
        product: see `GroupedFloat8BlockProduct`.

    Raises:
        ValueError: a type, shape or address that does not fit.
    """
    summed_dim, b_tile, fp8 = product["summed_dim"], product["b_tile"], product["fp8"]
    end = Rows(product["table"], product["bias"], product["row_factor"], product["accumulate"], out)
    check_choice("summed_dim", summed_dim, (0, 1))
    check_choice("b_tile", b_tile, ((1, TILE), (TILE, TILE)))
    check_types(fp8)
    (rows, depth), (_, cols), groups = extents("a", a), extents("out", out), check_table(end.table)
    depth_tiles = -(-depth // TILE)
    check_summed("a", depth)
    check_rows("a", a, (torch.uint8,), (rows, depth))
    check_rows("b", b, (torch.uint8,), (groups * cols, depth) if summed_dim == 1 else (groups * depth, cols))
    check_rows("a_scale", a_scale, (torch.float32,), (depth_tiles, rows), at_least=True)
    grid = _grid(groups, (cols, depth), summed_dim, b_tile)
    check_members_rows("b_scale", b_scale, grid, groups)
    check_ends_of_rows(end, rows)
    torch.ops.te_dist.grouped_gemm_float8_block(a, a_scale, b, b_scale, end.table, summed_dim, b_tile, fp8, *end[1:])


def _grid(groups: int, extents: Pair, summed_dim: int, tile: Pair) -> Pair:
    """Of the scales of all groups. extents: (N, K).

    Raises:
        ValueError: what is summed over along dimension 0 has no scales of squares, or ends within one.
    """
    cols_tiles, depth_tiles = (-(-extent // TILE) for extent in extents)
    if summed_dim == 1:
        return (groups * depth_tiles, extents[0]) if tile[0] == 1 else (groups * cols_tiles, depth_tiles)
    if tile[0] == 1 or extents[1] % TILE:
        got = "scales of runs" if tile[0] == 1 else f"{extents[1]} values that are summed over"
        raise ValueError(
            f"summed_dim: got 0 with {got}, wanted scales of squares and a multiple of {TILE}; quantize along the "
            "other dimension, or transpose what is quantized (te_dist.ops.transpose)"
        )
    return groups * depth_tiles, cols_tiles


def check_members_rows(name: str, scale: Tensor, grid: Pair, groups: int) -> None:
    """fp32 of `grid` at least, but with exactly its rows: where a member begins follows from how many each has."""
    check_rows(name, scale, (torch.float32,), grid, at_least=True)
    if scale.shape[0] != grid[0]:
        raise ValueError(
            f"{name}: got {scale.shape[0]} rows, wanted {grid[0]}, {grid[0] // max(groups, 1)} for each of {groups} "
            "groups; take the rows that are padding out, between members and behind the last"
        )


def values(codes: Tensor, scale: Tensor, tile: Pair, fp8: str) -> Tensor:
    """(rows, K) fp32 values of codes; `scale` as products read it, K outermost for runs."""
    out = torch.empty(codes.shape, dtype=torch.float32)
    grid = [-(-extent // size) for extent, size in zip(codes.shape, tile, strict=True)]
    scale = scale.t() if tile[0] == 1 else scale
    dequantize_float8(codes, scale[: grid[0], : grid[1]], tile=tile, phase=(0, 0), fp8=fp8, out=out)
    return out


def _cpu(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, table: Tensor, *rest: Any) -> None:
    summed_dim, b_tile, fp8, *others = rest
    left = values(a, a_scale, (1, TILE), fp8[0])
    matrices, scales = (in_groups(tensor, table.shape[1] - 1) for tensor in (b, b_scale))

    def product_of(group: int, rows: slice) -> Tensor:
        matrix = values(matrices[group], scales[group], tuple(b_tile), fp8[1])
        # In the order of a transposed matrix, whose sums have the same bits.
        return left[rows] @ (matrix if summed_dim == 1 else matrix.t().contiguous()).t()

    write_rows(product_of, Rows(table, *others))


register(
    "grouped_gemm_float8_block(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor table, int summed_dim, "
    "int[] b_tile, str[] fp8, Tensor? bias, Tensor? row_factor, bool accumulate, Tensor(a!) out) -> ()",
    _cpu,
    kernels.grouped_gemm_float8_block,
)
