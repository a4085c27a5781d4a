"""What is called to quantize masters of ranges.

[Note: Flat shards]
The rows that a range lies in are quantized as a part of the matrix, zeros standing for values of other ranks: they
raise no amax, and their codes are not used. Amaxes that parts share are agreed on in one MAX reduction for all weights.
Scales are then handed out in a second one, of bytes, where ranks that do not hold one have zero; so that the codes are
all that is left to gather.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from te_dist._torch_private import copy_each
from te_dist.flat_shards.cuts import Piece, Range, partitions, pieces
from te_dist.flat_shards.planes import byte_of, in_order, plane_fields, planes_of, take_out
from te_dist.formats import Field, Format, Partition, Region, geometry
from te_dist.ops.multi_tensor import Batch
from te_dist.scaling.agreement import PartsQuantization
from te_dist.tensor import QuantizedStorage

Shards = Sequence[Tensor | Sequence[Tensor] | None] | None
_BYTES_APART = 16  # what is quantized into directly, and scales that are handed out, begin at multiples of this


def planes_given(shard: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
    """What was given for the planes of a weight."""
    if shard is None:
        return []
    return [shard] if isinstance(shard, Tensor) else list(shard)


@dataclass
class Own:
    """What this rank has of one matrix.

    Attributes:
        matrix: the whole.
        piece: of its values.
        partition: of its rows over all ranks.
        values: of the master, flat; None where there are none.
        targets: flat bytes that the codes are written to, one for each plane.
    """

    matrix: QuantizedStorage
    piece: Piece
    partition: Partition
    values: Tensor | None
    targets: list[Tensor]

    @property
    def cols(self) -> int:
        return self.matrix.shape[1]

    @property
    def region(self) -> Region:
        """The rows that the values lie in."""
        return Region(self.piece.rows, self.matrix.region.cols)

    @property
    def is_rows(self) -> bool:
        """Whether the values are whole rows."""
        return self.piece.stop - self.piece.start == len(self.piece.rows) * self.cols

    @property
    def skipped(self) -> int:
        """Values of other ranks in front of those of this one."""
        return self.piece.start - self.piece.rows.start * self.cols


class Plan:
    """How masters of some weights become codes.

    Attributes:
        ranges: of this rank.
        weights: what they are ranges of.
        group: over which they are spread.
    """

    def __init__(
        self, weights: Sequence[QuantizedStorage], ranges: Sequence[Sequence[Range]], group: dist.ProcessGroup | None
    ) -> None:
        """Args: ranges: of every rank."""
        self.group, self.ranges = group, tuple(ranges[dist.get_rank(group)])
        self.weights = [weakref.ref(weight) for weight in weights]
        self._partitions = [
            partitions(weight, of) for weight, of in zip(weights, zip(*ranges, strict=True), strict=True)
        ]
        self._bound: tuple[list[tuple[int, torch.dtype]], _Bound] | None = None

    def run(self, weights: Sequence[QuantizedStorage], masters: Sequence[Tensor | None], shards: Shards) -> None:
        """Quantizes. Collective."""
        if shards is None:
            targets = [_cut(*each) for each in zip(weights, self.ranges, strict=True)]
        else:
            targets = [planes_given(shard) for shard in shards]
        tensors = [*(m for m in masters if m is not None), *(plane for planes in targets for plane in planes)]
        tensors += [weight.buffers[each.name] for weight in weights for each in _scale_fields(weight.format)]
        places = [(tensor.data_ptr(), tensor.dtype) for tensor in tensors]
        if self._bound is None or self._bound[0] != places:
            own: list[Own] = []
            for each in zip(weights, self.ranges, self._partitions, masters, targets, strict=True):
                own += _owned(*each)
            self._bound = places, _Bound(own, self.group)
        self._bound[1].run()
        for weight in weights:
            take_out(weight)
            weight.unsettled = None
            weight.note_master()


class _Bound:
    """What is called to quantize masters that stay where they are."""

    def __init__(self, own: Sequence[Own], group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._values, self._codes, self._scales_in, self._scales_out = ([] for _ in range(4))
        self._turned: list[tuple[Field, QuantizedStorage, int, Tensor]] = []
        device = own[0].matrix.device if own else torch.device("cpu")
        parts = [(self._part(each), self._matrix(each), each.partition) for each in own]
        self._scales, views = _laid_out([each.matrix for each in own], device)
        for each, (part, _, _), scales in zip(own, parts, views, strict=True):
            self._hand_out(each, part, scales)
        noop = torch.zeros(1, dtype=torch.int32, device=device)
        over = group or dist.group.WORLD
        assert over is not None
        self._parts = PartsQuantization(parts, (over,), noop=noop) if parts else None
        readers = self._parts.readers if self._parts else []
        self._readers = Batch([[reader] for reader in readers if reader is not None], noop)

    def _matrix(self, own: Own) -> Tensor:
        """The rows that the values lie in: these themselves, or zeros that they are copied between."""
        if own.values is None:
            return torch.zeros(own.region.shape, device=own.matrix.device)
        if own.is_rows:
            return own.values.view(own.region.shape)
        rows = own.values.new_zeros(own.region.shape)
        self._values.append((rows.view(-1)[own.skipped :][: own.values.numel()], own.values))
        return rows

    def _part(self, own: Own) -> QuantizedStorage:
        """What the rows are quantized into: the place of the codes itself where that can be."""
        matrix, region = own.matrix, own.region
        buffers: dict[str, Tensor] = {}
        for declared, target in zip(plane_fields(matrix.format), own.targets, strict=True):
            if (
                target.numel()
                and own.is_rows
                and declared == in_order(declared)
                and not target.data_ptr() % _BYTES_APART
            ):
                buffers[declared.name] = target.view(declared.dtype).view(declared.shape(region))
        others = tuple(each for each in matrix.format.canonical.fields if each.name not in buffers)
        written = buffers | geometry.empty_all(others, region, device=matrix.device)
        part = QuantizedStorage(matrix.format, written, region, dtype=matrix.dtype)
        for declared, target in zip(plane_fields(matrix.format), own.targets, strict=True):
            if declared.name in buffers or not target.numel():
                continue
            start = byte_of(declared, own.cols, own.skipped)
            if declared == in_order(declared):
                codes = written[declared.name].view(-1).view(torch.uint8)
                self._codes.append((target, codes[start:][: target.numel()]))
            else:
                self._turned.append((declared, part, start, target))
        return part

    def _hand_out(self, own: Own, part: QuantizedStorage, scales: dict[str, Tensor]) -> None:
        """Notes what is copied from a part to the scales of the whole matrix, and from there into it."""
        whole = own.matrix.region
        for declared in _scale_fields(own.matrix.format):
            view, held = scales[declared.name], geometry.compact(declared, part.buffers[declared.name], part.region)
            for region in own.piece.regions(own.cols):
                target = geometry.window(declared, view, whole, region)
                self._scales_in.append((target, geometry.window(declared, held, part.region, region)))
            self._scales_out.append((geometry.compact(declared, own.matrix.buffers[declared.name], whole), view))

    def run(self) -> None:
        """Collective."""
        if self._parts is None:
            return
        _copy(self._values)
        self._parts.begin()
        self._readers.run()
        self._parts.finish()
        for declared, part, start, target in self._turned:
            plane = geometry.relayout(declared, in_order(declared), part.buffers[declared.name], part.region)
            target.copy_(plane.view(-1).view(torch.uint8)[start:][: target.numel()])
        _copy(self._codes)
        if self._scales.numel():
            self._scales.zero_()
            _copy(self._scales_in)
            dist.all_reduce(self._scales, dist.ReduceOp.MAX, group=self._group)
            _copy(self._scales_out)


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        copy_each(*zip(*pairs, strict=True))


@lru_cache(maxsize=1024)
def _scale_fields(format: Format) -> tuple[Field, ...]:
    """Canonical fields that are handed out."""
    planes = plane_fields(format)
    return tuple(each for each in format.canonical.fields if each not in planes)


def _laid_out(matrices: Sequence[QuantizedStorage], device: torch.device) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """One buffer for the scales of all matrices, and the views, by field name, of each."""
    sizes = [
        (each, declared.compact_bytes(matrix.region))
        for each, matrix in enumerate(matrices)
        for declared in _scale_fields(matrix.format)
    ]
    buffer = torch.zeros(
        sum(-(-size // _BYTES_APART) * _BYTES_APART for _, size in sizes), dtype=torch.uint8, device=device
    )
    views: list[dict[str, Tensor]] = [{} for _ in matrices]
    start = 0
    for each, size in sizes:
        matrix = matrices[each]
        declared = _scale_fields(matrix.format)[len(views[each])]
        shape = declared.compact_shape(matrix.region)
        views[each][declared.name] = buffer[start : start + size].view(declared.dtype).view(shape)
        start += -(-size // _BYTES_APART) * _BYTES_APART
    return buffer, views


def _cut(weight: QuantizedStorage, own: Range) -> list[Tensor]:
    """The place of a range in every plane of a weight."""
    places = zip(planes_of(weight), plane_fields(weight.format), strict=True)
    return [plane[slice(*_bytes(weight, declared, *own))] for plane, declared in places]


def _bytes(weight: QuantizedStorage, declared: Field, start: int, length: int) -> Range:
    """First byte and end of a range in a plane."""
    if not length:
        return 0, 0
    cols = weight.members[0].shape[1]
    return byte_of(declared, cols, start), byte_of(declared, cols, start + length)


def _owned(
    weight: QuantizedStorage,
    own: Range,
    cut: Sequence[Partition],
    master: Tensor | None,
    targets: Sequence[Tensor],
) -> list[Own]:
    """A range of a weight by its matrices."""
    targets = targets or [torch.empty(0, dtype=torch.uint8, device=weight.device)] * len(plane_fields(weight.format))
    found, offset, taken = [], 0, 0
    for matrix, piece, partition in zip(weight.members, pieces(weight, *own), cut, strict=True):
        size, place = piece.stop - piece.start, offset + piece.start
        values = master.detach().view(-1)[taken : taken + size] if master is not None and size else None
        of_matrix = []
        for declared, target in zip(plane_fields(weight.format), targets, strict=True):
            (base, _), (first, end) = _bytes(weight, declared, *own), _bytes(weight, declared, place, size)
            of_matrix.append(target.view(-1)[first - base : end - base] if size else target[:0])
        found.append(Own(matrix, piece, partition, values, of_matrix))
        offset, taken = offset + math.prod(matrix.shape), taken + size
    return found
