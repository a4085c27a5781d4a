"""Products of groups of rows with a matrix of each group: codes with scale bytes, MXFP8 or NVFP4."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.kernels.gemm_decoded import is_turned
from te_dist.kernels.gemm_staged import GRAINS, STEP
from te_dist.ops._checks import check_choice, check_dtype, check_packed, check_shape, extents, grid_shape, takes
from te_dist.ops._grouped_products import Rows, check_ends_of_rows, in_groups, write_rows
from te_dist.ops._library import register
from te_dist.ops._taped import taped
from te_dist.ops.dequantize_mxfp8 import dequantize_mxfp8
from te_dist.ops.dequantize_nvfp4 import dequantize_nvfp4
from te_dist.ops.gemm_decoded import Coded
from te_dist.ops.group_table import check_table
from te_dist.ops.quantize_nvfp4 import E4M3_MAX

_E2M1_MAX = 6


class _OfGroups(TypedDict):
    table: Tensor


class GroupedDecodedProduct(_OfGroups, total=False):
    """table: int32 (4, G + 1), see `group_table`.  bias: (G, N) fp32, bf16 or fp16, contiguous, or None.

    row_factor: f32 (T,), or None, which a row of the output, bias included, is multiplied by before rounding.
    accumulate: add to what `out` holds, in fp32.
    """

    bias: Tensor | None
    row_factor: Tensor | None
    accumulate: bool


@taped
@takes(GroupedDecodedProduct)
def grouped_gemm_decoded(a: Coded, b: Coded, *, out: Tensor, **product: Unpack[GroupedDecodedProduct]) -> None:
    """out[rows of g] = a[rows of g] b[g]^T for every group g, decoded and summed as `gemm_decoded` does it.

    Rows behind the last group are left as they are; groups may begin anywhere. Both operands are FP8 with e8m0 bytes
    for (1, 32), or e2m1 with e4m3 bytes for (1, 16) values; factors are (1, 1), or (G, 1): one for each group. On CUDA
    rows of codes are multiples of 16 bytes long and apart, rows of scales of 4 bytes apart, with room for whole words.

    Args:
        a: (T, K), summed along the rows of memory; K a multiple of 64.
        b: (G * N, K); or, where the kept dimension is the contiguous one, (N, G * K).
        out: (T, N) fp32, bf16 or fp16, rows contiguous; fp32 to accumulate.
        product: see `GroupedDecodedProduct`.

    Raises:
        ValueError: a type, shape or address that does not fit.
    """
    rest = product["table"], product.get("bias"), product.get("row_factor"), bool(product.get("accumulate")), out
    groups, (_, cols) = check_table(rest[0]), extents("out", out)
    check_operand("a", a, groups)
    check_operand("b", b, groups)
    rows, depth = a.shape
    if is_turned(a.codes):
        raise ValueError(f"a: got strides {a.codes.stride()}, wanted contiguous rows, which groups cut; transpose it")
    turned = is_turned(b.codes)
    check_shape("b", b, (cols, groups * depth) if turned else (groups * cols, depth))
    check_depth(depth)
    check_ends_of_rows(Rows(*rest), rows)
    torch.ops.te_dist.grouped_gemm_decoded(*flat(a), *flat(b), *rest)


def check_operand(name: str, operand: Coded, groups: int) -> None:
    """Codes with scale bytes that begin with a tile, and a factor for all groups or one for each."""
    codes, kind, scale, tile, phase, factor, _ = operand
    check_choice(f"{name}.kind", kind, tuple(GRAINS))
    check_dtype(f"{name}.codes", codes, (torch.uint8,))
    check_choice(f"{name}.tile", tuple(tile), ((1, GRAINS[kind]),))
    check_choice(f"{name}.phase", tuple(phase), ((0, 0),))
    if codes.dim() != 2 or (codes.numel() and 1 not in (codes.stride()[1:] if kind == "e2m1" else codes.stride())):
        raise ValueError(
            f"{name}.codes: got shape {tuple(codes.shape)} and strides {codes.stride()}, wanted a matrix with a "
            "contiguous dimension, the summed one for e2m1; copy or transpose it"
        )
    if scale is None:
        raise ValueError(f"{name}.scale: got None, wanted scale bytes; pass those of its codes")
    check_dtype(f"{name}.scale", scale, (torch.uint8,))
    check_shape(f"{name}.scale", scale, grid_shape(operand.shape, phase, tile))
    if factor is not None:
        check_packed(f"{name}.factor", factor, (torch.float32,), (1, 1) if factor.numel() == 1 else (groups, 1))


def check_depth(depth: int) -> None:
    """Raises ValueError where what is summed over does not end with a stage of the kernel."""
    if depth == 0 or depth % STEP:
        raise ValueError(f"a: got {depth} values to sum over, wanted a multiple of {STEP}; pad with zero codes")


def flat(operand: Coded) -> tuple[Tensor, str, Tensor | None, Tensor | None, float]:
    """An operand in the order of the schema."""
    codes, kind, scale, _, _, factor, constant = operand
    return codes, kind, scale, factor, constant


def values(codes: Tensor, kind: str, scale: Tensor) -> Tensor:
    """(kept, summed) fp32 values of codes, without factors."""
    grain = (1, GRAINS[kind])
    if kind == "e2m1":
        out = torch.empty(codes.shape[0], 2 * codes.shape[1])
        amax = torch.full((1, 1), float(_E2M1_MAX * E4M3_MAX[0]))
        codes = codes.contiguous()
        dequantize_nvfp4(codes, scale, amax, packed_dim=1, phase=(0, 0), e4m3_max=E4M3_MAX[0], out=out)
    else:
        out = torch.empty(codes.shape)
        dequantize_mxfp8(codes, scale, grain=grain, phase=(0, 0), fp8=kind, out=out)
    return out


def factor_of(group: int, *sides: tuple) -> float:
    """What sums of a group are multiplied by."""
    product = 1.0
    for *_, factor, constant in sides:
        product *= constant * (1.0 if factor is None else factor.flatten()[group % factor.numel()].item())
    return product


def _cpu(*arguments: Any) -> None:
    a, b, (table, *rest) = arguments[:5], arguments[5:10], arguments[10:]
    left, right = values(*a[:3]), values(*b[:3])
    matrices = in_groups(right, table.shape[1] - 1, 1 if is_turned(b[0]) else 0)
    write_rows(lambda g, rows: left[rows] @ matrices[g].t() * factor_of(g, a, b), Rows(table, *rest))


register(
    "grouped_gemm_decoded(Tensor a, str a_kind, Tensor a_scale, Tensor? a_factor, float a_constant, "
    "Tensor b, str b_kind, Tensor b_scale, Tensor? b_factor, float b_constant, "
    "Tensor table, Tensor? bias, Tensor? row_factor, bool accumulate, Tensor(a!) out) -> ()",
    _cpu,
    kernels.grouped_gemm_decoded,
)
