"""Quantizers of formats with a scale for each run (1-D) or square (2-D) of values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, cast

import torch

from te_dist import catalog
from te_dist.codecs import NvFp4
from te_dist.codecs.base import KnownEncoding
from te_dist.codecs.nvfp4 import SIGN_MASK
from te_dist.formats import WHOLE, Direction, Format
from te_dist.quantizers.base import AgreeingQuantizer, Fp8Type, Quantizer, declared, fp8_name, with_eps


@dataclass
class Float8BlockQuantizer(Quantizer):
    """FP8 with fp32 scales.

    Attributes:
        fp8_dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        force_pow_2_scales: round scales down to powers of two.
        amax_epsilon: lower bound of every amax.
        block_scaling_dim: 1 for runs along the contraction, 2 for squares.
    """

    fp8_dtype: Fp8Type = torch.float8_e4m3fn
    force_pow_2_scales: bool = field(default=True, kw_only=True)
    amax_epsilon: float = field(default=0.0, kw_only=True)
    block_scaling_dim: Literal[1, 2] = field(default=2, kw_only=True)

    def __post_init__(self) -> None:
        self.declare(torch.bfloat16)  # refuses options that no format has

    def declare(self, dtype: torch.dtype) -> Format:
        fp8, pow2 = fp8_name(self.fp8_dtype), self.force_pow_2_scales
        return with_eps(declared(catalog.float8_block, self.block_scaling_dim, fp8=fp8, pow2=pow2), self.amax_epsilon)

    @property
    def takes_groups(self) -> bool:
        return type(self) is Float8BlockQuantizer and self.block_scaling_dim == 1

    @property
    def reads_once(self) -> bool:
        return type(self) is Float8BlockQuantizer


@dataclass
class MXFP8Quantizer(Quantizer):
    """FP8 with a power-of-two scale byte for 32 values.

    Attributes:
        fp8_dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        with_2d_quantization: squares instead of runs.
    """

    fp8_dtype: Fp8Type = torch.float8_e4m3fn
    with_2d_quantization: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self.declare(torch.bfloat16)

    def declare(self, dtype: torch.dtype) -> Format:
        return declared(catalog.mxfp8, 2 if self.with_2d_quantization else 1, fp8=fp8_name(self.fp8_dtype))

    @property
    def takes_groups(self) -> bool:
        return type(self) is MXFP8Quantizer

    @property
    def reads_once(self) -> bool:
        return type(self) is MXFP8Quantizer


@dataclass
class NVFP4Quantizer(AgreeingQuantizer):
    """Four-bit values with an FP8 scale for 16 of them and one fp32 amax.

    Attributes:
        with_rht: transform the columnwise direction by random signs and Hadamard matrices; its amax is found after.
        with_random_sign_mask: False for the Hadamard matrix without signs.
        with_2d_quantization: squares instead of runs.
        stochastic_rounding: round by chance, with 8 random bits: magnitudes up with the probability of their distance
            from the code below, rounded down to 1/256.
        row_scaled_nvfp4: an amax for every row; rowwise only.
        nvfp4_use_4over6: choose per block whether its largest value maps to 6 or to 4.
        nvfp4_e4m3_max: largest scale byte, 448 or 256.
        nvfp4_4over6_err_mode: error by which 4 or 6 is chosen, "MAE" or "MSE".
    """

    with_rht: bool = field(default=False, kw_only=True)
    with_random_sign_mask: bool = field(default=True, kw_only=True)
    with_2d_quantization: bool = field(default=False, kw_only=True)
    stochastic_rounding: bool = field(default=False, kw_only=True)
    row_scaled_nvfp4: bool = field(default=False, kw_only=True)
    nvfp4_use_4over6: bool = field(default=False, kw_only=True)
    nvfp4_e4m3_max: Literal[256, 448] = field(default=448, kw_only=True)
    nvfp4_4over6_err_mode: Literal["MAE", "MSE"] = field(default="MAE", kw_only=True)

    def __post_init__(self) -> None:
        if self.row_scaled_nvfp4 and (self.with_2d_quantization or self.with_amax_reduction):
            raise ValueError("row_scaled_nvfp4 keeps an amax per row: turn off with_2d_quantization and amax reduction")
        if self.with_2d_quantization and self.with_rht:
            raise ValueError("squares hold the same values both ways, a transform does not: turn one of the two off")
        self.declare(torch.bfloat16)

    def declare(self, dtype: torch.dtype) -> Format:
        over = cast(Literal["mae", "mse"], self.nvfp4_4over6_err_mode.lower()) if self.nvfp4_use_4over6 else "none"
        options = NvFp4(
            (WHOLE, WHOLE),  # the catalog knows the tiles
            e4m3_max=self.nvfp4_e4m3_max,
            four_over_six=over,
            stochastic=self.stochastic_rounding,
        )
        mask = (SIGN_MASK if self.with_random_sign_mask else 0) if self.with_rht else None
        if self.row_scaled_nvfp4:
            return _row_scaled(options, mask)
        return _nvfp4(2 if self.with_2d_quantization else 1, options, mask)

    @property
    def takes_groups(self) -> bool:
        return type(self) is NVFP4Quantizer and not (self.with_amax_reduction or self.row_scaled_nvfp4)


@cache
def _nvfp4(dims: Literal[1, 2], options: NvFp4, mask: int | None) -> Format:
    """`options` in both directions, the tiles those of the catalog; columnwise transformed by `mask`."""
    plain = catalog.nvfp4(dims)
    row, col = (_with_tile_of(plain[d], options) for d in plain.directions)
    return catalog.nvfp4(dims, row=row, col=replace(col, hadamard=mask))


def _with_tile_of(known: KnownEncoding, options: NvFp4) -> NvFp4:
    return replace(options, tile=known.codec.tile)


@cache
def _row_scaled(options: NvFp4, mask: int | None) -> Format:
    rowwise = catalog.nvfp4_row_scaled()[Direction.ROWWISE]
    row = replace(_with_tile_of(rowwise, options), row_scaled=True)
    return Format(replace(rowwise, codec=row), _nvfp4(1, options, mask).columnwise)
