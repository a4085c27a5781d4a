"""Operands of products as `ops.gemm_decoded` takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_dist.codecs.base import logical_view
from te_dist.codecs.high_precision import HighPrecision
from te_dist.codecs.nvfp4 import NvFp4
from te_dist.formats import WHOLE
from te_dist.ops.gemm_decoded import Coded

if TYPE_CHECKING:
    from te_dist.codecs.gemm import Operand

_E2M1_MAX = 6


def coded(operand: Operand) -> Coded:
    """What the fields of an operand declare: the data, then scales on a grid, or one for a whole summed dimension."""
    encoding, stored, region, summed = operand
    codec = encoding.codec
    if isinstance(codec, HighPrecision):
        return Coded(operand.matrix(), str(codec.dtype).removeprefix("torch."))
    kind, constant = ("e2m1", 1 / (_E2M1_MAX * codec.e4m3_max)) if isinstance(codec, NvFp4) else (codec.fp8, 1.0)
    parts: dict[str, Any] = {}
    for field, tensor in zip(encoding.fields[1:], stored[1:], strict=True):
        view, grain, phase = logical_view(field, tensor, region), field.grain, region.phase(field.grain)
        if summed == 0:
            view, grain, phase = view.t(), grain[::-1], phase[::-1]
        parts |= {"factor": view} if grain[1] == WHOLE else {"scale": view, "tile": grain, "phase": phase}
    return Coded(operand.matrix(), kind, constant=constant, **parts)
