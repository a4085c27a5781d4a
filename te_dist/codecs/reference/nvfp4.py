"""NVFP4: E2M1 data, an E4M3 scale for every block, an f32 amax for the tensor (or for every row)."""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor

from te_dist.codecs.reference.casts import E2M1_MAX, e2m1_cast, e2m1_decode, float8_cast, float8_decode, fp8_max
from te_dist.codecs.reference.f32 import from_bits, quotient
from te_dist.codecs.reference.philox import philox_bytes
from te_dist.codecs.reference.tiles import spread, tile_amax, tiles
from te_dist.formats import WHOLE
from te_dist.formats.region import Pair

FourOverSix = Literal["none", "mae", "mse"]

_FLT_MAX = torch.tensor(torch.finfo(torch.float32).max)
_RECIPROCAL_6_BITS = 0x3E2AAAAB
_RECIPROCAL_RANGE_BITS = {448: 0x39C30C31, 256: 0x3A2AAAAB}  # 1/2688 and 1/1536


class Nvfp4Rule(TypedDict):
    """How an amax becomes a scale, and scaled values become codes."""

    e4m3_max: int  # block scale of the largest block: 448, or 256 where 4-over-6 needs the room above
    four_over_six: FourOverSix  # error by which a block is mapped to 4 or to 6; "none": always to 6
    rng_state: Tensor | None  # int64 (seed, offset): round stochastically


def encode_nvfp4(
    x: Tensor,
    tile: Pair,
    phase: Pair = (0, 0),
    tensor_amax: Tensor | None = None,
    amax: Tensor | None = None,
    **rule: Unpack[Nvfp4Rule],
) -> tuple[Tensor, Tensor]:
    """Codes (u8 (m, k), 0 to 15, unpacked) and E4M3 block scales (u8 (grid_m, grid_k)) of `x` (m, k).

    Args:
        x: f32, bf16 or fp16.
        tile: rows and columns that share a block scale.
        phase: offset of the first element of `x` inside its tile.
        tensor_amax: f32 (1, 1), or (m, 1) for row scaling; `None`: that of `x`.
        amax: f32 on the tile grid, replaces that of `x`; `None`: that of `x`.
        rule: see `Nvfp4Rule`.
    """
    if tensor_amax is None:
        tensor_amax = tile_amax(x, (WHOLE, WHOLE))
    if amax is None:
        amax = tile_amax(x, tile, phase)
    _check(tile, tensor_amax, **rule)
    gain = tensor_scale(tensor_amax, rule["e4m3_max"])
    if rule["four_over_six"] == "none":
        scale = float8_cast(torch.fmin(amax * (gain * from_bits(_RECIPROCAL_6_BITS)), _FLT_MAX), "e4m3")
        random = None if rule["rng_state"] is None else philox_bytes(rule["rng_state"], x.numel()).reshape(x.shape)
        return e2m1_cast(x.float() * spread(_block_gain(scale, gain), x.shape, tile, phase), random), scale

    base = quotient(amax, E2M1_MAX) * gain
    choices = []
    for stretch in (1.0, 1.5):
        scale = float8_cast(torch.fmin(base * stretch, torch.tensor(fp8_max("e4m3"))), "e4m3")
        codes = e2m1_cast(x.float() * spread(_block_gain(scale, gain), x.shape, tile, phase))
        value = e2m1_decode(codes) * spread(float8_decode(scale, "e4m3"), x.shape, tile, phase)
        error = quotient(value * tensor_amax, E2M1_MAX * rule["e4m3_max"]) - x.float()
        choices.append((codes, scale, error))
    return _pick(choices, tile, phase, rule["four_over_six"])


def decode_nvfp4(
    codes: Tensor, scale_grid: Tensor, tensor_amax: Tensor, tile: Pair, phase: Pair, *, e4m3_max: int
) -> Tensor:
    """Values (f32 (m, k)) of `codes` (u8 (m, k), unpacked): code * ((block scale * amax) * (1 / (6 * e4m3_max)))."""
    block = spread(float8_decode(scale_grid, "e4m3"), codes.shape, tile, phase)
    return e2m1_decode(codes) * (block * tensor_amax * from_bits(_RECIPROCAL_RANGE_BITS[e4m3_max]))


def tensor_scale(tensor_amax: Tensor, e4m3_max: int) -> Tensor:
    """The multiplier (f32) that brings `tensor_amax` to 6 * e4m3_max; 1 where that is 0 or infinite."""
    scale = torch.fmin(quotient(e4m3_max * E2M1_MAX, tensor_amax), _FLT_MAX)
    return torch.where((tensor_amax == 0) | (scale == 0), torch.ones_like(scale), scale)


def _block_gain(scale: Tensor, gain: Tensor) -> Tensor:
    """The multiplier (f32, on the tile grid) under block scales `scale` (E4M3 bytes) and tensor scale `gain`."""
    return torch.fmin(quotient(1.0, float8_decode(scale, "e4m3") * quotient(1.0, gain)), _FLT_MAX)


def _pick(
    choices: list[tuple[Tensor, Tensor, Tensor]], tile: Pair, phase: Pair, error: FourOverSix
) -> tuple[Tensor, Tensor]:
    """Of (codes, scale, differences) mapped to 6 and mapped to 4, for every tile the one that errs less; a tie is 6."""
    (codes6, scale6, _), (codes4, scale4, _) = choices
    error6, error4 = (tile_sum(tiles(d.abs() if error == "mae" else d * d, tile, phase)) for *_, d in choices)
    to_four = error4 < error6
    codes = torch.where(spread(to_four, codes6.shape, tile, phase), codes4, codes6)
    return codes, torch.where(to_four, scale4, scale6)


def tile_sum(terms: Tensor) -> Tensor:
    """Sum over tiles, (grid_m, tile_m, grid_k, tile_k) to (grid_m, grid_k), f32, in the order that defines the bytes.

    One element after the other along a tile of one row or one column. In a square tile every row is summed so, left to
    right; then rows are folded in halves, row i plus row i + 8, then i + 4, i + 2, i + 1. It is the same order for
    both directions, so that their bytes agree.
    """
    rows = _sum_in_order(terms, 3)
    if terms.shape[3] == 1:
        return _sum_in_order(rows, 1)
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def _sum_in_order(terms: Tensor, dim: int) -> Tensor:
    first, *others = terms.unbind(dim)
    for term in others:
        first = first + term
    return first


def _check(
    tile: Pair, tensor_amax: Tensor, *, e4m3_max: int, four_over_six: FourOverSix, rng_state: Tensor | None
) -> None:
    if e4m3_max not in _RECIPROCAL_RANGE_BITS:
        raise ValueError(f"e4m3_max is one of {sorted(_RECIPROCAL_RANGE_BITS)}, got {e4m3_max}")
    if four_over_six not in ("none", "mae", "mse"):
        raise ValueError(f"four_over_six is 'none', 'mae' or 'mse', got {four_over_six!r}")
    if four_over_six != "none" and rng_state is not None:
        raise ValueError("4-over-6 compares rounding errors and excludes stochastic rounding; leave one of them out")
    if tensor_amax.shape[0] != 1 and tile[0] != 1:
        raise ValueError(f"row scaling needs tiles of one row, got tile {tile}; use one amax for the tensor")
