"""NVFP4: 4-bit codes with an e4m3 scale byte for a run of values or a square of them, below an fp32 amax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.formats.region import Pair
from te_dist.ops._checks import check_choice, check_packed, check_plane, takes
from te_dist.ops._library import register
from te_dist.ops._noop import check_noop, is_set
from te_dist.ops._planes import Planes, Wanted, check_direction, flat
from te_dist.ops.hadamard import check_rows, transformed_source
from te_dist.ops.panel_sums import find_sums
from te_dist.ops.source import Source, Unsummed, check_source, flat_source

TILE = 16
E4M3_MAX = (448, 256)
FOUR_OVER_SIX = ("none", "mae", "mse")
_ABSENT = ((1, 1), None, None, None, None)


class NvFp4Planes(Planes, total=False):
    """*_tensor_amax: f32 (1, 1); in the row direction also (rows, 1), one for each row.

    col_hadamard: sign mask of a Hadamard transform of the rows (see `hadamard`), rounded to bf16, which the direction
    is of; None for none. Rows and their phase are multiples of 16 then.
    """

    row_tensor_amax: Tensor | None
    col_tensor_amax: Tensor | None
    col_hadamard: int | None


@takes(NvFp4Planes)
def quantize_nvfp4(
    x: Tensor | Source,
    *,
    phase: Pair,
    e4m3_max: int,
    four_over_six: str,
    rng_state: Tensor | None,
    noop: Tensor | None = None,
    **planes: Unpack[NvFp4Planes],
) -> None:
    """Finds the scale byte of every tile, stores it and casts; both directions in one pass over `x`.

    Args:
        x: (rows, cols), fp32, bf16 or fp16; or a source.
        phase: offset of its first element inside the first 16 x 16 tile.
        e4m3_max: largest scale byte, 448 or 256.
        four_over_six: "none", or the error by which the largest value of a tile becomes 6 or 4: "mae", "mse".
        rng_state: int64 (2,), seed and offset of the stream for stochastic rounding, or (2, 2), those of the row and of
            the column direction; None rounds to nearest even.
        noop: int32 or fp32, one element on the device of `x`: nothing is written where any of its bits is set.
        planes: tiles (1, 16), (16, 1) or (16, 16); row_data (rows, cols / 2), col_data (cols, rows / 2); row_scale u8
            (rows, tiles along cols), col_scale u8 (tiles along rows, cols): a square's byte is repeated.
    """
    check_source(x, phase)
    check_choice("e4m3_max", e4m3_max, E4M3_MAX)
    check_choice("four_over_six", four_over_six, FOUR_OVER_SIX)
    check_noop(noop, x)
    if rng_state is not None:
        check_packed("rng_state", rng_state, (torch.int64,), (2, 2) if rng_state.dim() == 2 else (2,))
    rows, cols = x.shape
    hadamard = planes.get("col_hadamard")
    if hadamard is not None:
        _check_transformed(rows, phase, four_over_six)
    if planes.get("row_data") is not None:
        _check_even("row_data", "columns", cols, phase[1])
        _check_tensor_amax(planes, "row", ((1, 1), (rows, 1)))
    if planes.get("col_data") is not None:
        _check_even("col_data", "rows", rows, phase[0])
        _check_tensor_amax(planes, "col", ((1, 1),))
    check_direction(planes, Wanted("row", TILE, (rows, cols // 2), torch.uint8, False), x, phase)
    check_direction(planes, Wanted("col", TILE, (cols, rows // 2), torch.uint8, False), x, phase)
    row, col = (
        (tile, planes.get(f"{s}_tensor_amax"), *rest) for s in ("row", "col") for tile, *rest in (flat(planes, s),)
    )
    rule = (phase, e4m3_max, four_over_six, hadamard)
    torch.ops.te_dist.quantize_nvfp4(*flat_source(x), *rule, *row, *col, rng_state, noop)


def _check_transformed(rows: int, phase: Pair, four_over_six: str) -> None:
    check_rows(rows, phase[0])
    if four_over_six != "none":
        raise ValueError(
            f"four_over_six: got {four_over_six!r} beside col_hadamard; use 'none': it compares exact errors"
        )


def _check_even(name: str, what: str, extent: int, phase: int) -> None:
    if extent % 2 or phase % 2:
        raise ValueError(
            f"{name}: got {extent} {what} from offset {phase}, wanted even numbers, as two share a byte; "
            "cut and pad at pairs"
        )


def _check_tensor_amax(planes: NvFp4Planes, side: str, shapes: tuple[Pair, ...]) -> None:
    amax = planes.get(f"{side}_tensor_amax")
    if amax is None:
        raise ValueError(f"{side}_tensor_amax: got None beside {side}_data; pass the amax of the whole tensor")
    shape = shapes[-1] if tuple(amax.shape) == shapes[-1] else shapes[0]
    check_plane(f"{side}_tensor_amax", amax, torch.float32, shape)


def _cpu(
    x: Tensor, source: str, beside: list[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    phase, e4m3_max, four_over_six, hadamard, *planes, rng_state, noop = rest
    if is_set(noop):
        return
    row, col, read = planes[:5], planes[5:], (x, source, beside)
    row_state, col_state = rng_state if rng_state is not None and rng_state.dim() == 2 else (rng_state, rng_state)

    def quantize(read: Unsummed, row: Sequence[object], col: Sequence[object], state: Tensor | None) -> None:
        _C.quantize_nvfp4(read, phase, (e4m3_max, four_over_six), row, col, state, torch.get_num_threads())

    if hadamard is None and row_state is col_state:
        quantize(read, row, col, rng_state)
    else:
        quantize(read, row, _ABSENT, row_state)
        quantize(read if hadamard is None else transformed_source(read, hadamard), _ABSENT, col, col_state)
    find_sums(read, sums, row_sums)


register(
    "quantize_nvfp4(Tensor x, str source, Tensor[] beside, Tensor(s!)? panel_sums, Tensor(t!)? row_sums, "
    "int[] phase, int e4m3_max, str four_over_six, int? hadamard, "
    "int[] row_tile, Tensor? row_tensor_amax, Tensor? row_amax, Tensor(a!)? row_data, Tensor(b!)? row_scale, "
    "int[] col_tile, Tensor? col_tensor_amax, Tensor? col_amax, Tensor(c!)? col_data, Tensor(d!)? col_scale, "
    "Tensor? rng_state, Tensor? noop) -> ()",
    _cpu,
    kernels.quantize_nvfp4,
)
