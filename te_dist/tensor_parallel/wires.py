"""Quantized rows on the wire: all fields of a part as one run of bytes, gathered in one collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from te_dist.formats import Field, Format, Region, Span, geometry
from te_dist.tensor import QuantizedStorage, collectives, empty

Runs = Sequence[Region]


def sent_fields(format: Format) -> tuple[Field, ...]:
    """Canonical fields of which ranks hold different rows, widest elements first: each starts where its dtype may."""
    fields = (f for f in format.canonical.fields if not f.is_shared(0))
    return tuple(sorted(fields, key=lambda f: -f.dtype.itemsize))


def wire_bytes(format: Format, runs: Runs) -> int:
    """Bytes of all sent fields of a part that has these runs of rows."""
    return sum(field.compact_bytes(run) for field in sent_fields(format) for run in runs)


def gather_rows(
    runs: Sequence[QuantizedStorage], parts: Sequence[Runs], whole: Region, *, group: dist.ProcessGroup
) -> QuantizedStorage:
    """The canonical fields of the whole matrix, of which this rank has `runs` and every rank the regions in `parts`.

    Sends the bytes of the largest part. Fields that all rows share are taken from this rank.
    """
    first = runs[0]
    nbytes = max(wire_bytes(first.format, part) for part in parts)
    gathered = collectives.all_gather(_pack(runs, nbytes), group)
    storage = empty(first.format, whole, dtype=first.dtype, device=first.device, fields=sent_fields(first.format))
    if (strides := _strides(first.format, tuple(parts), whole, nbytes)) is not None:
        _assemble_at_once(storage, gathered, strides)
    else:
        _assemble(storage, gathered.view(len(parts), nbytes), parts, whole)
    shared = {f.name: first.buffers[f.name] for f in first.format.canonical.fields if f.is_shared(0)}
    storage.buffers |= shared
    return storage


class _Strides(NamedTuple):
    """Where a field of equal parts lies in what was gathered, and in a stored tensor: arguments of `as_strided`."""

    source: tuple[Sequence[int], Sequence[int], int]
    target: tuple[Sequence[int], Sequence[int], int]


def _assemble_at_once(storage: QuantizedStorage, gathered: Tensor, strides: Sequence[_Strides]) -> None:
    """`geometry.assemble` of every sent field in one copy each, whatever the number of parts."""
    for field, (source, target) in zip(sent_fields(storage.format), strides, strict=True):
        out = storage.buffers[field.name]
        if field.is_padded(storage.region):
            out.zero_()
        out.as_strided(*target).copy_(gathered.view(field.dtype).as_strided(*source))


def _assemble(storage: QuantizedStorage, gathered: Tensor, parts: Sequence[Runs], whole: Region) -> None:
    wires = {field.name: [] for field in sent_fields(storage.format)}
    for rank, part in enumerate(parts):
        for field, view in _unpack(storage.format, part, gathered[rank]):
            wires[field.name].append(view)
    regions = [run for part in parts for run in part]
    for field in sent_fields(storage.format):
        geometry.assemble(field, wires[field.name], regions, whole, storage.buffers[field.name])


@lru_cache(maxsize=4096)
def _strides(
    format: Format, parts: tuple[tuple[Region, ...], ...], whole: Region, nbytes: int
) -> tuple[_Strides, ...] | None:
    """By sent field; None where parts are not equal, share a tile, or lie at bytes where torch views nothing."""
    num_parts, num_runs, length = len(parts), len(parts[0]), len(parts[0][0].rows)
    starts = [
        [whole.rows.start + (run * num_parts + part) * length for run in range(num_runs)] for part in range(num_parts)
    ]
    even = [[Region(Span(start, length), whole.cols) for start in each] for each in starts]
    if [list(part) for part in parts] != even or not length:
        return None
    at, found = 0, []
    for field in sent_fields(format):
        size, run = field.dtype.itemsize, parts[0][0]
        unit = field.grain[0] * (field.pack if field.order == "km" else 1)
        if length % unit or whole.rows.start % unit or nbytes % size or at % size:
            return None
        outer, inner = field.compact_shape(run)
        pitch = field.shape(whole)[1]
        start, apart, each = at // size, nbytes // size, outer * inner
        if field.order == "mk":
            extents = num_runs, num_parts, outer, inner
            source = each, apart, inner, 1
            target = num_parts * outer * pitch, outer * pitch, pitch, 1
        else:
            extents = outer, num_runs, num_parts, inner
            source = inner, each, apart, 1
            target = pitch, num_parts * inner, inner, 1
        found.append(_Strides((extents, source, start), (extents, target, 0)))
        at += num_runs * each * size
    return tuple(found)


def _pack(runs: Sequence[QuantizedStorage], nbytes: int) -> Tensor:
    """1-D uint8: field by field, run by run, without padding; zeros up to `nbytes`."""
    pieces = [
        geometry.compact(field, run.buffers[field.name], run.region).contiguous().view(-1).view(torch.uint8)
        for field in sent_fields(runs[0].format)
        for run in runs
    ]
    missing = nbytes - sum(piece.numel() for piece in pieces)
    if missing:
        pieces.append(torch.zeros(missing, dtype=torch.uint8, device=runs[0].device))
    return torch.cat(pieces)


def _unpack(format: Format, runs: Runs, wire: Tensor) -> Iterator[tuple[Field, Tensor]]:
    """Inverse of `_pack`: for every field, a view of each run in turn."""
    at = 0
    for field in sent_fields(format):
        for run in runs:
            size = field.compact_bytes(run)
            part = wire[at : at + size] if size else wire.new_empty(0)  # torch views nothing at an odd place
            yield field, part.view(field.dtype).view(field.compact_shape(run))
            at += size
