"""One direction of a quantized matrix laid out as the other, where both hold the same codes."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import ops
from te_dist.formats import Field, Region, geometry


def turned_squares(src: Field, dst: Field, region: Region) -> int | None:
    """Whether `dst` is the transpose of whole matrices of `src`, which a kernel writes without anything beside it: rows
    and columns of the squares whose values it repeats, or 1; None where it is no such transpose.
    """
    turns = src.order != dst.order and src.bits == dst.bits and src.tile == dst.tile
    padded = any(field.compact_shape(region)[0] != field.shape(region)[0] for field in (src, dst))  # in lines
    if not turns or padded:
        return None
    if src.grain == src.tile == dst.grain:
        return None if src.pack > 1 and any(extent % src.pack for extent in region.shape) else 1
    square = src.tile[0]
    grains = {"mk": (1, square), "km": (square, 1)}
    repeats = src.tile == (square, square) and all(each.grain == grains[each.order] for each in (src, dst))
    return square if repeats and src.pack == 1 and region.phase(src.tile) == (0, 0) else None


def relaid(src: Field, dst: Field, stored: Tensor, *, region: Region, out: Tensor | None) -> Tensor:
    """`geometry.relayout`, by the compiled kernel where it is a transpose."""
    square = turned_squares(src, dst, region)
    if square is None:
        return geometry.relayout(src, dst, stored, region, out)
    if out is None:  # which is written with its padding
        shape = (*stored.shape[:-2], *dst.shape(region))
        out = torch.empty(shape, dtype=dst.dtype, device=stored.device)
    ops.transpose(stored, bits=src.bits, out=out, square=square)
    return out
