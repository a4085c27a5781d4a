"""FP8 with one scale for the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_dist import ops
from te_dist.codecs.base import Codec, OfFloat8, Plane, check_is_one, logical_view
from te_dist.formats import WHOLE, Field, Region
from te_dist.formats.region import Pair
from te_dist.ops.quantize_float8_current import WORKSPACE
from te_dist.ops.source import Source, unsummed


@dataclass(frozen=True)
class Tensorwise(OfFloat8, Codec):
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
    def turned(self) -> Tensorwise | None:
        return self

    @property
    def amax_tiles(self) -> tuple[Pair, ...]:
        return ((WHOLE, WHOLE),)

    def encode(self, x: Tensor | Source, region: Region, planes: Sequence[Plane]) -> None:
        (amax,) = planes[0].amax or (None,)
        workspace = torch.empty(WORKSPACE, dtype=torch.float32, device=x.device) if amax is None else None
        rule = dict(fp8=self.fp8, pow2=self.pow2, eps=self.eps)
        ops.quantize_float8_current(x, **rule, amax=amax, workspace=workspace, **_outputs(planes))

    def encode_scaled(
        self, x: Tensor | Source, scale: Tensor, planes: Sequence[Plane], *, recorded: Tensor | None = None
    ) -> None:
        """Quantizes by a `scale` (f32, one element) that is known beforehand, as delayed scaling has it.

        Args:
            recorded: f32, one element, raised to the amax of `x` in the same pass.
        """
        ops.quantize_float8_tensor(x, scale.reshape(1), fp8=self.fp8, amax=recorded, **_outputs(planes))

    def encode_groups(self, x: Tensor | Source, table: Tensor, planes: Sequence[Plane]) -> None:
        amax = torch.empty(table.shape[1] - 1, dtype=torch.float32, device=x.device)
        ops.grouped_amax(unsummed(x), table=table, out=amax)
        rule = dict(fp8=self.fp8, pow2=self.pow2, eps=self.eps)
        ops.grouped_quantize_float8_current(x, amax, table=table, **rule, **_outputs(planes))

    def encode_groups_scaled(
        self,
        x: Tensor | Source,
        scale: Tensor,
        planes: Sequence[Plane],
        *,
        table: Tensor,
        recorded: Tensor | None = None,
    ) -> None:
        """Quantizes groups of rows by a `scale` (f32, (G,)) of each; `recorded`: (G,), as in `encode_scaled`."""
        ops.grouped_quantize_float8_tensor(x, scale, table=table, fp8=self.fp8, amax=recorded, **_outputs(planes))

    def operand(self, stored: Sequence[Tensor], fields: Sequence[Field], region: Region, *, out: Tensor) -> None:
        check_is_one(stored[1])
        data = logical_view(fields[0], stored[0], region)
        ops.dequantize_float8(data, stored[1], tile=(WHOLE, WHOLE), phase=(0, 0), fp8=self.fp8, out=out)


def _outputs(planes: Sequence[Plane]) -> dict[str, Any]:
    """Data and scale of each plane, as the quantize ops take them."""
    outputs = {}
    for plane in planes:
        way = "row" if plane.encoding.fields[0].order == "mk" else "col"
        outputs[f"{way}_data"], outputs[f"{way}_scale"] = plane.stored
    return outputs
