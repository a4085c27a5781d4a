"""Moving stored values by their declaration, in plain torch. This is the definition; kernels must agree byte for byte.

A *stored* tensor has the extents of `Field.shape`, a *wire* those of `Field.compact_shape` (no padding). *Values* are
a tensor on the tile grid of the region, in logical (row, col) order, one element per tile. All of them may have
dimensions in front of these two: members of a group, each a matrix of the same region.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from te_dist.formats.field import Field
from te_dist.formats.region import Region, Span


def empty(field: Field, region: Region, *, device: torch.device | str, leading: tuple[int, ...] = ()) -> Tensor:
    """An uninitialised stored tensor whose padding, if any, is zero; `leading`: dimensions in front."""
    if leading:
        make = torch.zeros if field.is_padded(region) else torch.empty
        return make((*leading, *field.shape(region)), dtype=field.dtype, device=device)
    (tensor,) = empty_all((field,), region, device=device).values()
    return tensor


def empty_all(fields: tuple[Field, ...], region: Region, *, device: torch.device | str) -> dict[str, Tensor]:
    """`empty` for each of `fields`, by name."""
    return {name: make(shape, dtype=dtype, device=device) for name, make, shape, dtype in _allocations(fields, region)}


@lru_cache(maxsize=4096)
def _allocations(fields: tuple[Field, ...], region: Region) -> list[tuple[str, Any, tuple[int, int], torch.dtype]]:
    """(name, function, shape, dtype) of each."""
    makers = (torch.zeros if field.is_padded(region) else torch.empty for field in fields)
    return [(f.name, make, f.shape(region), f.dtype) for f, make in zip(fields, makers, strict=True)]


def load(field: Field, stored: Tensor, region: Region) -> Tensor:
    """Values of `stored` on the tile grid of `region`."""
    values = _unpack(field, compact(field, stored, region), region)
    if field.grain == field.tile:
        return values
    for dim, span in enumerate((region.rows, region.cols)):
        values = _by_tile(field, dim, span, values)
    return values


def store(field: Field, values: Tensor, region: Region, out: Tensor | None = None) -> Tensor:
    """Inverse of `load`: writes `values` into `out` (or a new stored tensor) and zeros into its padding."""
    if field.grain != field.tile:
        for dim, span in enumerate((region.rows, region.cols)):
            values = _by_grain(field, dim, span, values)
    if field.order == "km":
        values = values.mT
    if field.pack == 2:
        values = _pack(values)
    return padded(field, values, region, out)


def compact(field: Field, stored: Tensor, region: Region) -> Tensor:
    """The wire of a stored tensor: a view without its padding, in stored order."""
    if not field.is_padded(region):
        return stored
    outer, inner = field.compact_shape(region)
    return stored[..., :outer, :inner]


def padded(field: Field, wire: Tensor, region: Region, out: Tensor | None = None) -> Tensor:
    """Inverse of `compact`: copies `wire` into `out` (or a new stored tensor), zeros into its padding."""
    if out is None:
        out = empty(field, region, device=wire.device, leading=tuple(wire.shape[:-2]))
    elif field.is_padded(region):
        out.zero_()
    compact(field, out, region).copy_(wire)
    return out


def narrow(field: Field, stored: Tensor, region: Region, part: Region, out: Tensor | None = None) -> Tensor:
    """Stored tensor of `part`, a sub-rectangle of `region`. Values of tiles that are cut go to both sides."""
    return padded(field, window(field, compact(field, stored, region), region, part), part, out)


def assemble(
    field: Field, wires: Sequence[Tensor], parts: Sequence[Region], region: Region, out: Tensor | None = None
) -> Tensor:
    """Stored tensor of `region` from the wires of the `parts` it was cut into.

    Parts that share a tile hold the same value for it, so overlaps may be written in any order.
    """
    if out is None:
        out = empty(field, region, device=wires[0].device, leading=tuple(wires[0].shape[:-2]))
    elif field.is_padded(region):
        out.zero_()
    whole = compact(field, out, region)
    for wire, part in zip(wires, parts, strict=True):
        if wire.numel():
            window(field, whole, region, part).copy_(wire)
    return out


def relayout(src: Field, dst: Field, stored: Tensor, region: Region, out: Tensor | None = None) -> Tensor:
    """The same values in another order, grain or packing: a transpose, possibly of nibbles, possibly repeating."""
    return store(dst, load(src, stored, region), region, out)


def is_concatenation(field: Field, parts: Sequence[Region], region: Region) -> bool:
    """Whether wires, filled up to the length of the longest and laid end to end, begin with the stored tensor.

    `parts` are row shards that cover `region`, in order. False for the order "km" and for padding.
    """
    if field.order != "mk" or field.is_padded(region):
        return False
    whole = region.rows.blocks(field.grain[0])
    shards = [part.rows.blocks(field.grain[0]) for part in parts]
    longest = max(len(rows) for rows in shards)
    for index, rows in enumerate(shards):
        missing = len(whole) - index * longest
        if missing > 0 and (rows.start - whole.start != index * longest or len(rows) < min(longest, missing)):
            return False
    return True


def window(field: Field, wire: Tensor, region: Region, part: Region) -> Tensor:
    """View of the stored values of `part` inside the wire of `region`.

    Raises:
        ValueError: `part` begins or ends inside a stored byte.
    """
    return wire[..., *extent(field, region, part)]


def extent(field: Field, region: Region, part: Region) -> tuple[slice, slice]:
    """(outer, inner) elements of the wire of `region` that hold the values of `part`; raises as `window` does."""
    spans = zip(region.blocks(field.grain), part.blocks(field.grain), (region.rows, region.cols), strict=True)
    slices: list[slice] = []
    for dim, (whole, inner, span) in enumerate(spans):
        step = field.pack if dim == field.inner_dim else 1
        start, stop = inner.start - whole.start, inner.stop - whole.start
        if len(inner) and (start % step or (stop % step and stop != len(whole))):
            raise ValueError(
                f"{field.name}: a cut at {span} falls inside a stored byte; cut at multiples of {field.alignment(dim)}"
            )
        slices.append(slice(start // step, start // step + -(-len(inner) // step)))
    rows, cols = slices
    return (rows, cols) if field.order == "mk" else (cols, rows)


def _pack(values: Tensor) -> Tensor:
    """Two nibbles to a byte, the first in its low half; a last one without partner has zeros beside it."""
    if values.shape[-1] % 2:
        values = functional.pad(values, (0, 1))
    return values[..., 0::2] | values[..., 1::2] << 4


def _unpack(field: Field, wire: Tensor, region: Region) -> Tensor:
    """Grain-grid values in logical order."""
    if field.pack == 2:
        wire = torch.stack((wire & 0xF, wire >> 4), dim=-1).flatten(-2)
        wire = wire[..., : len(region.blocks(field.grain)[field.inner_dim])]
    return wire.mT if field.order == "km" else wire


def _by_tile(field: Field, dim: int, span: Span, values: Tensor) -> Tensor:
    """Of the grain grid along `dim`: for every tile that `span` touches the first stored value of it."""
    if field.grain[dim] == field.tile[dim]:
        return values
    step, before = _grains_of_tile(field, dim, span)
    if before == 0 or not len(span):
        return values[_along(dim, slice(0, None, step))]
    parts = values.narrow(dim - 2, 0, 1), values[_along(dim, slice(step - before, None, step))]
    return torch.cat(parts, dim=dim - 2)


def _by_grain(field: Field, dim: int, span: Span, values: Tensor) -> Tensor:
    """Of the tile grid along `dim`: for every stored value that `span` touches that of its tile."""
    if field.grain[dim] == field.tile[dim]:
        return values
    step, before = _grains_of_tile(field, dim, span)
    repeated, count = values.repeat_interleave(step, dim - 2), len(span.blocks(field.grain[dim]))
    return repeated if count == repeated.shape[dim - 2] else repeated.narrow(dim - 2, before, count)


def _grains_of_tile(field: Field, dim: int, span: Span) -> tuple[int, int]:
    """How many stored values a tile has along `dim`, and how many of the first one's lie before `span`."""
    step = field.tile[dim] // field.grain[dim]
    return step, span.blocks(field.grain[dim]).start - span.blocks(field.tile[dim]).start * step


def _along(dim: int, part: slice) -> tuple[Any, ...]:
    """Index of a part of rows (0) or columns (1)."""
    return (..., part, slice(None)) if dim == 0 else (..., part)
