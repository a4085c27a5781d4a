"""Product of two FP8 matrices with fp32 scales for every 128 values that are summed over."""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.formats.region import Pair
from te_dist.ops._checks import (
    HIGH_PRECISION,
    check_choice,
    check_packed,
    check_product,
    check_rows,
    check_types,
    extents,
    takes,
    tiles_touched,
)
from te_dist.ops._library import register

TILE = 128
PHASE_MULTIPLE = 16  # so that the bytes of an output from a tile on are aligned as those of its rows


class Float8BlockProduct(TypedDict):
    """b_tile: (rows, cols) of `b` that share a scale, (1, 128) or (128, 128).  fp8: types of `a` and `b`.

    phase: where in a tile lie the first row of `b` (0 where a tile is one row) and the first value that is summed over;
    multiples of 16 below 128.

    parts: into how many the sum is cut, each over a multiple of 512 values: they lie below each other in `out`, to be
    added by `add_parts`. Of more than one there is no bias, and nothing is added.

    bias: (N,) fp32, bf16 or fp16, added before rounding; or None.  accumulate: add to what `out` holds, in fp32.
    """

    b_tile: Pair
    phase: Pair
    parts: int
    fp8: tuple[str, str]
    bias: Tensor | None
    accumulate: bool


@takes(Float8BlockProduct)
def gemm_float8_block(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out: Tensor, **product: Unpack[Float8BlockProduct]
) -> None:
    """out (M, N) = a b^T, each code times its scale. 128 products are summed by tensor cores, such sums in fp32.

    On CUDA only. Rows of `a`, `b` and the scales are multiples of 16 bytes long and apart.

    Args:
        a: u8 codes (M, K), rows contiguous.
        a_scale: f32 (tiles along K, at least M): one for a row of 128 values.
        b: u8 codes (N, K), rows contiguous.
        b_scale: f32, (tiles along K, at least N), or (tiles along N, at least tiles along K) for squares.
        out: (parts * M, N) fp32, bf16 or fp16, rows contiguous; fp32 to accumulate.
        product: see `Float8BlockProduct`.

    Raises:
        ValueError: a type, shape or address that does not fit.
        NotImplementedError: on another device than CUDA.
    """
    b_tile, phase, fp8, parts = product["b_tile"], product["phase"], product["fp8"], product["parts"]
    bias, accumulate = product["bias"], product["accumulate"]
    check_choice("b_tile", b_tile, ((1, TILE), (TILE, TILE)))
    if not fits_phase(phase, b_tile):
        raise ValueError(f"phase: got {phase} in tiles of {b_tile}, wanted multiples of {PHASE_MULTIPLE} inside of one")
    check_types(fp8)
    (rows, depth), (cols, _) = extents("a", a), extents("b", b)
    depth_tiles = tiles_touched(depth, phase[1], TILE)
    check_rows("a", a, (torch.uint8,), (rows, depth))
    check_rows("b", b, (torch.uint8,), (cols, depth))
    check_rows("a_scale", a_scale, (torch.float32,), (depth_tiles, rows), at_least=True)
    grid = (depth_tiles, cols) if b_tile[0] == 1 else (tiles_touched(cols, phase[0], TILE), depth_tiles)
    check_rows("b_scale", b_scale, (torch.float32,), grid, at_least=True)
    check_product(out, (parts * rows, cols), accumulate)
    if parts < 1 or (parts > 1 and (bias is not None or accumulate or out.dtype != torch.float32)):
        raise ValueError(f"parts: got {parts}, wanted one, or more in fp32 without a bias that are added to nothing")
    if bias is not None:
        check_packed("bias", bias, HIGH_PRECISION, (cols,))
    torch.ops.te_dist.gemm_float8_block(a, a_scale, b, b_scale, b_tile, phase, fp8, parts, bias, accumulate, out)


def fits_phase(phase: Pair, b_tile: Pair) -> bool:
    """Whether matrices may begin there: see `Float8BlockProduct`."""
    return all(0 <= at < tile and at % PHASE_MULTIPLE == 0 for at, tile in zip(phase, b_tile, strict=True))


register(
    "gemm_float8_block(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, int[] b_tile, int[] phase, str[] fp8, "
    "int parts, Tensor? bias, bool accumulate, Tensor(a!) out) -> ()",
    None,
    kernels.gemm_float8_block,
)
