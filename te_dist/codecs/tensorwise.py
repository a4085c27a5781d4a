"""FP8 with one scale for the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from te_dist import ops
from te_dist.codecs.base import Codec, Plane, logical_view
from te_dist.codecs.scale import scale_from_amax
from te_dist.formats import WHOLE, Field, Region
from te_dist.formats.region import Pair


@dataclass(frozen=True)
class Tensorwise(Codec):
    """Fields: data (u8), scale_inv (f32, one value; a code times it is the value).

    Attributes:
        fp8: "e4m3" (largest 448) or "e5m2" (largest 57344).
        pow2: round the scale down to a power of two.
        eps: lower bound of the amax.
    """

    fp8: str = "e4m3"
    pow2: bool = False
    eps: float = 0.0

    @property
    def amax_tiles(self) -> tuple[Pair, ...]:
        return ((WHOLE, WHOLE),)

    def encode(self, x: Tensor, region: Region, planes: Sequence[Plane]) -> None:
        (amax,) = planes[0].amax or self.amax(x, region)
        self.encode_scaled(x, scale_from_amax(amax, fp8=self.fp8, pow2=self.pow2, eps=self.eps), planes)

    def encode_scaled(self, x: Tensor, scale: Tensor, planes: Sequence[Plane]) -> None:
        """Quantizes by a `scale` (f32, one element) that is known beforehand, as delayed scaling has it."""
        by_order = {plane.encoding.fields[0].order: plane.stored[0] for plane in planes}
        ops.quantize_float8_tensor(
            x, scale.reshape(1), fp8=self.fp8, row_data=by_order.get("mk"), col_data=by_order.get("km")
        )
        for plane in planes:
            plane.stored[1].copy_(scale.reciprocal().reshape(1, 1))

    def operand(self, stored: Sequence[Tensor], fields: Sequence[Field], region: Region, *, out: Tensor) -> None:
        data = logical_view(fields[0], stored[0], region)
        ops.dequantize_float8(data, stored[1], tile=(WHOLE, WHOLE), phase=(0, 0), fp8=self.fp8, out=out)
