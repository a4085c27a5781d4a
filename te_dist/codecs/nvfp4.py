"""NVFP4: 4-bit values (e2m1) with an FP8 scale for 16 values, or 16 x 16, and one fp32 amax for the tensor or row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from te_dist import ops
from te_dist.codecs.base import MOVE_SAVED, Amax, Plane, check_is_one, find_amax, logical_view
from te_dist.codecs.tiled import TiledCodec, group_arguments, plane_arguments, side
from te_dist.formats import WHOLE, Field, Region
from te_dist.formats.region import Pair
from te_dist.ops.evaluate import values
from te_dist.ops.hadamard import transformed
from te_dist.ops.source import Source, unsummed

LARGEST_TILE = (16, 16)  # offsets inside it are offsets inside every smaller tile
HADAMARD = 16  # rows that one Hadamard transform mixes
SIGN_MASK = 0xD7E8  # rows of each group of 16 whose sign the transform flips, as bits


@dataclass(frozen=True)
class NvFp4(TiledCodec):
    """Fields: data (u8, two codes a byte), scale (u8: e4m3), amax (f32, of the tensor or of each row).

    A value is `e2m1 * e4m3 * amax / (6 * e4m3_max)`.

    Attributes:
        tile: (rows, cols) that share a scale byte.
        row_scaled: every row has its own amax.
        e4m3_max: largest scale byte used, 448 or 256.
        four_over_six: choose per block whether its largest value maps to 6 or to 4 ("none", or the error compared).
        hadamard: transform the rows in groups of 16 before quantizing, by this sign mask; None for no transform.
        stochastic: round stochastically, by draws from torch's generator.
    """

    row_scaled: bool = False
    e4m3_max: int = 448
    four_over_six: Literal["none", "mae", "mse"] = "none"
    hadamard: int | None = None
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.four_over_six != "none" and (self.hadamard is not None or self.stochastic):
            raise ValueError("four_over_six chooses by exact error: turn off hadamard and stochastic rounding for it")

    @property
    def deterministic(self) -> bool:
        return not self.stochastic

    @property
    def turned(self) -> NvFp4 | None:
        is_bound = self.hadamard is not None or self.row_scaled or self.stochastic
        return None if is_bound else replace(self, tile=self.tile[::-1])

    @property
    def amax_tiles(self) -> tuple[Pair, ...]:
        return ((1, WHOLE) if self.row_scaled else (WHOLE, WHOLE), self.tile)

    def alignment(self, dim: int) -> int:
        if self.four_over_six != "none":
            return self.tile[dim]  # the choice weighs the errors of a whole tile
        return HADAMARD if self.hadamard is not None and dim == 0 else 1

    def check(self, region: Region) -> None:
        if self.hadamard is not None and (region.phase((HADAMARD, 1))[0] or len(region.rows) % HADAMARD):
            raise ValueError(
                f"the Hadamard transform mixes {HADAMARD} rows, got rows {region.rows}; cut and pad at multiples of it"
            )

    @cached_property
    def pass_key(self) -> object:
        return replace(self, tile=(0, 0), row_scaled=False, hadamard=None)

    def amax(self, x: Tensor | Source, region: Region) -> Amax:
        return super().amax(
            unsummed(x) if self.hadamard is None else transformed(values(unsummed(x)), self.hadamard), region
        )

    def encode(self, x: Tensor | Source, region: Region, planes: Sequence[Plane]) -> None:
        _find_tensor_amaxes(unsummed(x), region, planes)
        outputs = plane_arguments(planes, region)
        outputs |= {f"{side(plane.encoding)}_tensor_amax": plane.stored[2] for plane in planes}
        ops.quantize_nvfp4(
            x,
            phase=region.phase(LARGEST_TILE),
            e4m3_max=self.e4m3_max,
            four_over_six=self.four_over_six,
            rng_state=_draw_rng_state(x, planes) if self.stochastic else None,
            col_hadamard=_hadamard(planes),
            **outputs,
        )

    def encode_groups(self, x: Tensor | Source, table: Tensor, planes: Sequence[Plane]) -> None:
        if any(plane.encoding.codec.row_scaled for plane in planes):
            raise NotImplementedError(
                "NVFP4 with an amax for every row has no quantizer of groups of rows, which have one amax each; set "
                "row_scaled_activation=False"
            )
        hadamard = _hadamard(planes)
        amaxes = {f"{side(plane.encoding)}_amax": plane.stored[2] for plane in planes}
        ops.grouped_direction_amax(
            unsummed(x), table=table, hadamard=hadamard if "col_amax" in amaxes else None, **amaxes
        )
        outputs = group_arguments(planes)
        outputs |= {f"{side(plane.encoding)}_tensor_amax": plane.stored[2] for plane in planes}
        ops.grouped_quantize_nvfp4(
            x,
            table=table,
            e4m3_max=self.e4m3_max,
            four_over_six=self.four_over_six,
            rng_state=_draw_rng_state(x, planes) if self.stochastic else None,
            col_hadamard=hadamard,
            **outputs,
        )

    def operand(self, stored: Sequence[Tensor], fields: Sequence[Field], region: Region, *, out: Tensor) -> None:
        data, scale, amax = stored
        check_is_one(amax)
        grain = fields[1].grain
        ops.dequantize_nvfp4(
            data,
            logical_view(fields[1], scale, region),
            amax,
            packed_dim=fields[0].inner_dim,
            phase=region.phase(grain),
            e4m3_max=self.e4m3_max,
            out=out,
        )

    def decode(self, stored: Sequence[Tensor], fields: Sequence[Field], region: Region, *, out: Tensor) -> None:
        if self.hadamard is None:
            return self.operand(stored, fields, region, out=out)
        raise ValueError(
            "values quantized after a Hadamard transform cannot be dequantized one by one: a GEMM undoes it by "
            f"transforming its other operand alike; dequantize the rowwise direction instead. {MOVE_SAVED}"
        )


def _hadamard(planes: Sequence[Plane]) -> int | None:
    """The transform of the columnwise direction."""
    return next((plane.encoding.codec.hadamard for plane in planes if side(plane.encoding) == "col"), None)


def _find_tensor_amaxes(x: Tensor | Source, region: Region, planes: Sequence[Plane]) -> None:
    """Writes the amax field of every plane, in one pass over `x` but for amaxes of rows."""
    wanted = {}
    for plane in planes:
        codec, stored = plane.encoding.codec, plane.stored[2]
        if plane.amax:
            stored.copy_(plane.amax[0])
        elif codec.row_scaled:
            stored.copy_(find_amax(x, region, codec.amax_tiles[0]))
        else:
            wanted[f"{side(plane.encoding)}_amax"] = stored
    if wanted:
        ops.direction_amax(x, hadamard=_hadamard(planes) if "col_amax" in wanted else None, **wanted)


def _draw_rng_state(x: Tensor | Source, planes: Sequence[Plane]) -> Tensor:
    """(seed, offset) of the next run of stochastic rounding, drawn from torch's generator on the device of `x`.

    One for each plane where their codecs differ in more than the tile.
    """
    codecs = {replace(plane.encoding.codec, tile=(0, 0)) for plane in planes}
    state = torch.empty((len(codecs), 2), dtype=torch.int64, device=x.device).random_(2**62)
    return state if len(codecs) == 2 else state[0]
