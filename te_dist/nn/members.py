"""Matrices of one shape, each quantized alone, by as many launches as one takes: they are rows in groups of one size.

What is transposed of a matrix is made of its transpose, as what lies in rows of that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import codecs, ops
from te_dist.codecs import Plane
from te_dist.codecs.turned import as_rows
from te_dist.formats import WHOLE, Field, Format, Region
from te_dist.ops.group_table import TILE
from te_dist.tensor import empty_rows

_TABLE_ROWS = 4


def at_once(whole: Tensor, format: Format) -> dict[str, Tensor] | None:
    """Every matrix of `whole` (G, N, K) in the directions of `format`: by field name (G, *field.shape), any padding.

    None where that is not what rows in groups become: N, or K of what is transposed, is no multiple of 128, or one of
    the codecs does more than that.
    """
    num_groups, *extents = whole.shape
    known = [as_rows(format[direction]) for direction in format.independent]
    planes = [plane for plane in known if plane is not None and extents[plane[2]] % TILE == 0]
    if whole.numel() == 0 or len(planes) < len(known):
        return None
    buffers: dict[str, Tensor] = {}
    for encoding, along, is_turned in planes:
        matrices = _transposed(whole) if is_turned else whole.contiguous()
        rows, cols = matrices.shape[1:]
        found = empty_rows(
            Format(**{along.value: encoding}),
            (num_groups * rows, cols),
            _table(num_groups, rows, whole),
            dtype=whole.dtype,
        )
        codecs.encode_groups(matrices.flatten(0, 1), found.table, [Plane(encoding, found.stored(along))])
        region = Region.whole(rows, cols)
        for field in encoding.fields:
            buffers[field.name] = _of_members(field, found.buffers[field.name], region, num_groups)
    return buffers


def _transposed(whole: Tensor) -> Tensor:
    num_groups, rows, cols = whole.shape
    out = torch.empty((num_groups, cols, rows), dtype=whole.dtype, device=whole.device)
    ops.transpose(whole.contiguous(), bits=8 * whole.element_size(), out=out)
    return out


def _table(num_groups: int, rows: int, like: Tensor) -> Tensor:
    """The group table of as many groups of `rows`."""
    ends = torch.arange(rows, num_groups * rows + 1, rows, device=like.device)
    table = torch.empty((_TABLE_ROWS, num_groups + 1), dtype=torch.int32, device=like.device)
    ops.group_table(ends, rows=num_groups * rows, out=table)
    return table


def _of_members(field: Field, stored: Tensor, region: Region, num_groups: int) -> Tensor:
    """A field of rows in groups as that of each group: (G, outer, inner), copied where groups lie side by side."""
    if field.grain == (WHOLE, WHOLE):
        return stored.view(num_groups, 1, 1)
    outer, inner = field.shape(region)
    if field.order == "mk":
        return stored[: num_groups * outer].view(num_groups, outer, inner)
    return stored[:, : num_groups * inner].unflatten(1, (num_groups, inner)).transpose(0, 1).contiguous()
