"""Values as they are: the encoding of tensors, or of single directions, that stay in high precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from te_dist.codecs.base import Codec, Plane
from te_dist.formats import Field, Region
from te_dist.ops.evaluate import values
from te_dist.ops.source import Source


@dataclass(frozen=True)
class HighPrecision(Codec):
    """Attributes: dtype: floating-point type the values are held in."""

    pads_groups: ClassVar[bool] = False

    dtype: torch.dtype = torch.bfloat16

    def encode(self, x: Tensor | Source, region: Region, planes: Sequence[Plane]) -> None:
        matrix = values(x)
        for plane in planes:
            plane.field_view(0, region).copy_(matrix)

    def encode_groups(self, x: Tensor | Source, table: Tensor, planes: Sequence[Plane]) -> None:
        matrix = values(x)
        for plane in planes:
            plane.stored[0].copy_(matrix)

    def operand(self, stored: Sequence[Tensor], fields: Sequence[Field], region: Region, *, out: Tensor) -> None:
        out.copy_(stored[0] if fields[0].order == "mk" else stored[0].t())
