"""FP8 with one fp32 scale per tile of 128 values (1-D) or 128 x 128 values (2-D)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from te_dist import ops
from te_dist.codecs.base import OfFloat8, Plane, logical_view
from te_dist.codecs.tiled import TiledCodec, group_arguments, plane_arguments
from te_dist.formats import Field, Region
from te_dist.ops.source import Source

LARGEST_TILE = (128, 128)  # offsets inside it are offsets inside every smaller tile


@dataclass(frozen=True)
class Block(OfFloat8, TiledCodec):
    """Fields: data (u8), scale_inv (f32, one per tile; a code times it is the value).

    Attributes:
        tile: (rows, cols) that share a scale.
        fp8: "e4m3" (largest 448) or "e5m2" (largest 57344).
        pow2: round scales down to a power of two.
        eps: lower bound of a tile's amax.
    """

    fp8: str = "e4m3"
    pow2: bool = True
    eps: float = 0.0

    def encode(self, x: Tensor | Source, region: Region, planes: Sequence[Plane]) -> None:
        outputs, phase = plane_arguments(planes, region), region.phase(LARGEST_TILE)
        ops.quantize_float8_block(x, phase=phase, fp8=self.fp8, pow2=self.pow2, eps=self.eps, **outputs)

    def encode_groups(self, x: Tensor | Source, table: Tensor, planes: Sequence[Plane]) -> None:
        if any(1 not in plane.encoding.codec.tile and plane.encoding.fields[1].order == "km" for plane in planes):
            raise NotImplementedError(
                f"no quantizer of groups of rows for the columnwise direction of {self}, with scales of squares; take "
                "runs (block_scaling_dim=1)"
            )
        rule = dict(fp8=self.fp8, pow2=self.pow2, eps=self.eps)
        ops.grouped_quantize_float8_block(x, table=table, **rule, **group_arguments(planes))

    def operand(self, stored: Sequence[Tensor], fields: Sequence[Field], region: Region, *, out: Tensor) -> None:
        data, scale = (logical_view(f, s, region) for f, s in zip(fields, stored, strict=True))
        ops.dequantize_float8(data, scale, tile=self.tile, phase=region.phase(self.tile), fp8=self.fp8, out=out)
