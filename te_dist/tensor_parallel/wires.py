"""Quantized rows on the wire: all fields of a part as one run of bytes, gathered in one collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from te_dist.formats import Field, Format, Region, geometry
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
    gathered = collectives.all_gather(_pack(runs, nbytes), group).view(len(parts), nbytes)
    storage = empty(first.format, whole, dtype=first.dtype, device=first.device, fields=sent_fields(first.format))
    wires = {f.name: [] for f in sent_fields(first.format)}
    for rank, part in enumerate(parts):
        for field, view in _unpack(first.format, part, gathered[rank]):
            wires[field.name].append(view)
    regions = [run for part in parts for run in part]
    for field in sent_fields(first.format):
        geometry.assemble(field, wires[field.name], regions, whole, storage.buffers[field.name])
    shared = {f.name: first.buffers[f.name] for f in first.format.canonical.fields if f.is_shared(0)}
    storage.buffers |= shared
    return storage


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
