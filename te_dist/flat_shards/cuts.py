"""Which values of every weight each rank updates, and that all ranks take this for the same."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from te_dist.flat_shards.planes import num_values, plane_fields
from te_dist.formats import Format, Partition, Region, Span
from te_dist.tensor import QuantizedStorage

Range = tuple[int, int]  # (first value, values)


@dataclass(frozen=True)
class Report:
    """What a rank tells the others.

    Attributes:
        ranges: (first value, values) of every flattened weight.
        digests: of shape and format of every weight.
        problem: why this rank cannot go on; empty where it can.
    """

    ranges: tuple[Range, ...]
    digests: tuple[str, ...]
    problem: str = ""


def all_ready(obstacle: str, device: torch.device | None, group: dist.ProcessGroup | None) -> bool:
    """Whether there is no obstacle on any rank. Collective, and the host waits for it.

    Args:
        obstacle: why this rank is not ready; empty where it is.
        device: of the weights; None where there are none.
        group: of the ranks.

    Raises:
        ValueError: a CUDA graph is captured, for which nobody can wait, and this rank is not ready.
    """
    if device is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if obstacle:
            raise ValueError(obstacle)
        return True
    if "cpu:" in dist.get_backend_config(group):
        device = torch.device("cpu")  # the host does not wait for what the device has yet to do
    problem = torch.tensor(
        [bool(obstacle)], dtype=torch.int32, device=device or torch.accelerator.current_accelerator()
    )
    dist.all_reduce(problem, dist.ReduceOp.MAX, group=group)
    return not problem.item()


def exchange(report: Report, sizes: Sequence[int], group: dist.ProcessGroup | None) -> list[Report]:
    """What all ranks of the group told, in rank order. Collective.

    Raises:
        ValueError: alike on every rank: one has a problem, weights differ, or ranges leave out or share values.
    """
    reports: list[Report] = [report] * dist.get_world_size(group)
    dist.all_gather_object(reports, report, group=group)
    for rank, other in enumerate(reports):
        if other.problem:
            raise ValueError(f"rank {rank}: {other.problem}")
    different = [rank for rank, other in enumerate(reports) if other.digests != reports[0].digests]
    if different:
        raise ValueError(f"ranks {different} pass other weights than rank 0; pass the same ones in the same order")
    for weight, size in enumerate(sizes):
        ranges = [other.ranges[weight] for other in reports]
        end = 0
        for start, length in sorted(each for each in ranges if each[1]):
            if start != end:
                break
            end = start + length
        if end != size:
            raise ValueError(
                f"weight {weight} of {size} values is updated in the ranges (start, length) {ranges} by rank, wanted "
                "every value on one rank; check start_offsets and the lengths of masters"
            )
    return reports


def digest(storage: QuantizedStorage) -> str:
    """Equal on ranks whose weights are of one shape and format."""
    return hashlib.sha256(repr((tuple(storage.shape), storage.format, storage.dtype)).encode()).hexdigest()


def unfit_cut(storage: QuantizedStorage, start: int, length: int) -> str:
    """Why a weight cannot be cut into this range; empty where it can."""
    size = num_values(storage)
    if start < 0 or start + length > size:
        return f"got the range {start} to {start + length} of a weight of {size} values; pass one within it"
    rows, cols = storage.members[0].shape if size else (0, 1)
    row_unit, col_unit = _units(storage.format)
    for at in (start, start + length) if size else ():
        row, col = divmod(at % (rows * cols), cols)
        if row % row_unit or col and (row_unit > 1 or col % col_unit):
            where = (
                f"between rows, at multiples of {row_unit}" if row_unit > 1 else f"at every {col_unit} values of a row"
            )
            return (
                f"a cut at value {at} of a weight of shape {tuple(storage.shape)} goes through values that its format "
                f"stores or transforms together; cut {where}"
            )
    return ""


def _units(format: Format) -> tuple[int, int]:
    """Rows between which may be cut, and values of a row; within a row only where the former is 1."""
    codecs = [format.canonical[direction].codec for direction in format.canonical.directions]
    packs = (field.pack for field in plane_fields(format))
    rows, cols = (math.lcm(*(codec.alignment(dim) for codec in codecs)) for dim in (0, 1))
    return rows, math.lcm(cols, *packs)


@dataclass(frozen=True)
class Piece:
    """What a rank has of one matrix.

    Attributes:
        start, stop: values of the flattened matrix.
        rows: that these lie in, rounded to what is stored together.
    """

    start: int
    stop: int
    rows: Span

    def regions(self, cols: int) -> list[Region]:
        """The values as rectangles: a part of a row, whole rows, a part of a row."""
        (first, head), (last, tail) = divmod(self.start, cols), divmod(self.stop, cols)
        if self.start == self.stop:
            return []
        if first == last:
            return [Region(Span(first, 1), Span(head, tail - head))]
        found = [Region(Span(first, 1), Span(head, cols - head))] if head else []
        begin = first + bool(head)
        if last > begin:
            found.append(Region(Span(begin, last - begin), Span(0, cols)))
        return found + ([Region(Span(last, 1), Span(0, tail))] if tail else [])


def pieces(storage: QuantizedStorage, start: int, length: int) -> list[Piece]:
    """A range of a weight as one piece, possibly empty, of each of its matrices."""
    unit = math.lcm(*(field.alignment(0) for field in storage.format.canonical.fields))
    found, offset = [], 0
    for member in storage.members:
        rows, cols = member.shape
        size = rows * cols
        begin, end = (min(max(at - offset, 0), size) for at in (start, start + length))
        first = begin // cols // unit * unit if cols else 0
        last = min(-(-end // (cols * unit)) * unit, rows) if end > begin else first
        found.append(Piece(begin, end, Span(first, last - first)))
        offset += size
    return found


def partitions(storage: QuantizedStorage, ranges: Sequence[Range]) -> list[Partition]:
    """How each matrix of a weight is cut into the rows that the ranks hold values of."""
    by_rank = [pieces(storage, *each) for each in ranges]
    return [
        Partition(tuple(of_rank[index].rows for of_rank in by_rank), (member.region.cols,))
        for index, member in enumerate(storage.members)
    ]
