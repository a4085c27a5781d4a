"""MXFP8: FP8 with one power-of-two scale byte (e8m0) for 32 values, or for 32 x 32 values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from te_dist import ops
from te_dist.codecs.base import OfFloat8, Plane, logical_view
from te_dist.codecs.tiled import TiledCodec, group_arguments, plane_arguments
from te_dist.formats import Field, Region
from te_dist.ops.source import Source

LARGEST_TILE = (32, 32)  # offsets inside it are offsets inside every smaller tile


@dataclass(frozen=True)
class MxFp8(OfFloat8, TiledCodec):
    """Fields: data (u8), scale (u8: the biased exponent of a power of two; a code times it is the value).

    Attributes:
        tile: (rows, cols) that share a scale.
        fp8: "e4m3" (largest 448) or "e5m2" (largest 57344).
    """

    fp8: str = "e4m3"

    def encode(self, x: Tensor | Source, region: Region, planes: Sequence[Plane]) -> None:
        ops.quantize_mxfp8(x, phase=region.phase(LARGEST_TILE), fp8=self.fp8, **plane_arguments(planes, region))

    def encode_groups(self, x: Tensor | Source, table: Tensor, planes: Sequence[Plane]) -> None:
        ops.grouped_quantize_mxfp8(x, table=table, fp8=self.fp8, **group_arguments(planes))

    def operand(self, stored: Sequence[Tensor], fields: Sequence[Field], region: Region, *, out: Tensor) -> None:
        data, scale = (logical_view(f, s, region) for f, s in zip(fields, stored, strict=True))
        grain = fields[1].grain
        ops.dequantize_mxfp8(data, scale, grain=grain, phase=region.phase(grain), fp8=self.fp8, out=out)
