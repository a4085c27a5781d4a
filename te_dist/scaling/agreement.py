"""Ranks that hold parts of one matrix agree on the amaxes they share: all of them in one MAX reduction.

A per-tensor amax is shared by every part, the amax of a tile by the parts that a cut through it leaves on either side.
Which tiles these are follows from the cuts alone, so that every rank lays out the same buffer without asking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from te_dist._torch_private import copy_each
from te_dist.codecs import Amax
from te_dist.formats import WHOLE, Format, Partition, Region, Span
from te_dist.formats.field import Numerics
from te_dist.formats.region import Pair
from te_dist.kernels.tape import communicate
from te_dist.ops.multi_tensor import Batch, Call, record
from te_dist.tensor import Amaxes, QuantizedStorage, find_amaxes, traffic
from te_dist.tensor.parts import before_writing

Part = tuple[QuantizedStorage, Tensor, Partition]


@dataclass(frozen=True)
class Entry:
    """One part and what it brings to the agreement: the amaxes of its own values, replaced by those agreed on."""

    amaxes: Amaxes
    region: Region
    partition: Partition


@dataclass(frozen=True, eq=False)
class _Slots:
    """Places of one amax grid in the reduced buffer.

    Attributes:
        num_amaxes: of the grid of this part.
        size: number of shared amaxes of the matrix; the same on every rank.
        own: flat indices of the shared ones in the grid of this part.
        slot: their places among the `size`.
        is_whole: whether the grid is the shared ones of the matrix, in their order.
    """

    num_amaxes: int
    size: int
    own: Tensor
    slot: Tensor
    is_whole: bool


def agree(entries: Sequence[Entry], groups: Sequence[dist.ProcessGroup]) -> None:
    """Replaces, in place, every shared amax of all `entries` by its maximum over `groups`.

    Collective: every rank of every group calls it with the same matrices in the same order. There is one reduction per
    group, and none where nothing is shared.
    """
    every = [grid.view(-1) for entry in entries for grid in _in_order(entry.amaxes)]
    of_every = [each for entry in entries for each in _all_slots(entry.amaxes, entry.region, entry.partition)]
    shared = [(grid, each) for grid, each in zip(every, of_every, strict=True) if each.size]
    if not groups or not shared:
        return
    grids, slots = map(list, zip(*shared, strict=True))
    together = torch.cat(grids) if len(grids) > 1 else grids[0]
    _Reduction(together, slots, groups, owners=[None] * len(slots)).run()
    if together is not grids[0]:
        copy_each(grids, together.split([grid.numel() for grid in grids]))


def shares_scales(format: Format, partition: Partition) -> bool:
    """Whether any amax of `format` is shared between parts of `partition`."""
    return any(
        _shared_blocks(partition.rows, tile[0]) or _shared_blocks(partition.cols, tile[1])
        for direction in format.directions
        for tile in format[direction].codec.amax_tiles
    )


def num_shared_amaxes(format: Format, partition: Partition) -> int:
    """Amaxes of one matrix on which its parts agree: f32 values that are reduced over every group."""
    codecs = dict.fromkeys(format[direction].codec for direction in format.directions)
    return sum(_num_shared(tile, partition) for codec in codecs for tile in codec.amax_tiles)


class PartsQuantization:
    """Quantizes parts from tensors that stay where they are, as often as one likes; the bytes are those of the whole.

    What codecs launch is recorded once and run for all parts together, so that the number of launches does not depend
    on that of parts. A codec that does more than call ops that can be run together (a transform before, draws from the
    generator) is run part by part.

    Attributes:
        readers: for each part the call that reads its values first. Somebody else may run it between `begin` and
            `finish`. None where there is none.
    """

    readers: list[Call | None]

    def __init__(self, parts: Sequence[Part], groups: Sequence[dist.ProcessGroup], *, noop: Tensor) -> None:
        """Args:
        parts: storages, values (fp32, bf16 or fp16) and how the matrices are cut.
        groups: over which the parts are spread.
        noop: int32 (1,); where it is set nothing is written of what can be run together.
        """
        self._parts, self._noop = parts, noop
        self._shared = [bool(groups) and shares_scales(storage.format, partition) for storage, _, partition in parts]
        records = [_Record.of(part, shared) for part, shared in zip(parts, self._shared, strict=True)]
        self._amaxes = _lay_together(records, noop.device)
        self._grids = [record.amaxes for record in records]
        self._alone = [index for index, record in enumerate(records) if record.writes is None]
        self.readers = [
            record.take_first() if part[1].numel() else None for record, part in zip(records, parts, strict=True)
        ]
        self._finds = Batch([record.finds for record in records], noop)
        self._writes = Batch([record.writes or [] for record in records], noop)
        slots, owners = [], []
        for (storage, _, partition), grids in zip(parts, self._grids, strict=True):
            own = _all_slots(grids, storage.region, partition)
            slots += own
            owners += [storage] * len(own)
        self._reduction = _Reduction(self._amaxes, slots, groups, owners=owners) if any(self._shared) else None

    @property
    def obeys_noop(self) -> bool:
        """Whether nothing is written where `noop` is set: so it is where no part is run on its own."""
        return not self._alone

    @property
    def calls(self) -> list[Call]:
        """What `finish` runs for all parts together."""
        return [*self._finds.calls, *self._writes.calls]

    def run(self) -> None:
        """Quantizes. Collective, like `agree`."""
        self.begin()
        Batch([[reader] for reader in self.readers if reader is not None], self._noop).run()
        self.finish()

    def begin(self) -> None:
        """Before the readers run."""
        if self._amaxes.numel():
            self._amaxes.zero_()

    def finish(self) -> None:
        """After the readers have run. Collective, like `agree`."""
        self._finds.run()
        for index in self._alone:
            storage, values, _ = self._parts[index]
            if self._shared[index]:
                found = find_amaxes(values, storage.format, storage.region)
                copy_each(_in_order(self._grids[index]), _in_order(found))
        if self._reduction is not None:
            self._reduction.run()
        self._writes.run()
        for index in self._alone:
            storage, values, _ = self._parts[index]
            storage.quantize_(values, self._grids[index] if self._shared[index] else {})


def quantize_parts(parts: Sequence[Part], groups: Sequence[dist.ProcessGroup]) -> None:
    """Quantizes each part's values into its storage, as the bytes of the whole would be. Collective, like `agree`."""
    device = parts[0][1].device
    PartsQuantization(parts, groups, noop=torch.zeros(1, dtype=torch.int32, device=device)).run()


def settle_parts(
    unsettled: Sequence[tuple[QuantizedStorage, Tensor, Partition | None]], groups: Sequence[dist.ProcessGroup]
) -> None:
    """Quantizes what was last written into storages once more, by scales that all ranks agree on. Collective.

    Args:
        unsettled: storages, what was written, and how the matrix (or each of a group) is cut; None where it is not.
        groups: over which parts are spread.
    """
    storages = [storage for storage, _, _ in unsettled]
    histories = [(storage.initial, storage.mastered) for storage in storages]
    for storage in storages:
        before_writing(storage)
    quantize_parts([part for each in unsettled for part in parts_of(*each)], groups)
    for storage, (initial, mastered) in zip(storages, histories, strict=True):  # to agree changes no value
        storage.unsettled, storage.initial, storage.mastered = None, initial, mastered


def parts_of(storage: QuantizedStorage, values: Tensor, partition: Partition | None) -> list[Part]:
    """Each matrix of a storage with its values. `partition`: how it is cut; None where it is not."""
    if not storage.may_share_scales():
        partition = None
    return [(own, matrix, partition or Partition.of([own.region])) for own, matrix in storage.matrices(values)]


class _Reduction:
    """The MAX reduction of amaxes that lie one behind the other in one tensor. Allocates nothing when it runs.

    Where all amaxes of all grids are shared, they are reduced where they are.

    Args:
        amaxes: f32 (n,), all grids.
        slots: of each grid.
        groups: over which parts are spread.
        owners: of each grid the storage that is quantized by it; None where it has no name.
    """

    def __init__(
        self,
        amaxes: Tensor,
        slots: Sequence[_Slots],
        groups: Sequence[dist.ProcessGroup],
        *,
        owners: Sequence[QuantizedStorage | None],
    ) -> None:
        sizes = [(owner, each.size) for owner, each in zip(owners, slots, strict=True)]
        self._maximum = _Maximum(tuple(groups), tuple(sizes))
        self._amaxes = self._agreed = amaxes
        self._is_whole = all(each.is_whole for each in slots)
        if self._is_whole:
            return
        self._own, self._slot = _indices(tuple(slots), amaxes.device)
        self._found = torch.empty(len(self._own), device=amaxes.device)
        self._agreed = torch.empty(sum(each.size for each in slots), device=amaxes.device)

    def run(self) -> None:
        """Collective."""
        if not self._is_whole:
            torch.index_select(self._amaxes, 0, self._own, out=self._found)
            self._agreed.zero_().index_copy_(0, self._slot, self._found)
        if not self._amaxes.is_meta:  # a rehearsal launches what every rank launches, and sends nothing
            communicate(self._maximum, self._agreed)
        if not self._is_whole:
            torch.index_select(self._agreed, 0, self._slot, out=self._found)
            self._amaxes.index_copy_(0, self._own, self._found)


@lru_cache(maxsize=1024)
def _indices(slots: tuple[_Slots, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """(own, slot) of all grids behind one another; kept on the device, so that agreeing does not wait for it."""
    own, slot, start, size = [], [], 0, 0
    for each in slots:
        own.append(each.own + start)
        slot.append(each.slot + size)
        start, size = start + each.num_amaxes, size + each.size
    with torch.inference_mode(False):  # a later pass is trained
        return torch.cat(own).to(device), torch.cat(slot).to(device)


class _Maximum(NamedTuple):
    """Over `groups`, of shared amaxes; `sizes`: whose they are, and how many."""

    groups: tuple[dist.ProcessGroup, ...]
    sizes: tuple[tuple[QuantizedStorage | None, int], ...]

    def __call__(self, amaxes: Tensor) -> None:
        """Collective; in place."""
        for group in self.groups:
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
        traffic.report(lambda: self._shares(amaxes.itemsize))

    def _shares(self, itemsize: int) -> list[tuple[QuantizedStorage | None, int]]:
        """Whose amaxes were reduced, and their bytes over all groups."""
        times = sum(group.size() > 1 for group in self.groups)
        return [(owner, size * times * itemsize) for owner, size in self.sizes if size]


@dataclass
class _Record:
    """What is called to quantize one part.

    Attributes:
        amaxes: by codec, what is found first; none where codes need no more than the values.
        finds: calls that find them.
        writes: calls that quantize by them; None where quantizing is more than calls.
    """

    amaxes: dict[Numerics, Amax]
    finds: list[Call]
    writes: list[Call] | None

    @staticmethod
    def of(part: Part, shared: bool) -> _Record:
        """Of a part; `shared`: whether others have a say in its scales."""
        storage, values, _ = part
        writes = None if shared else record(lambda: storage.quantize_(values, {}))
        if writes is not None:
            return _Record({}, [], writes)
        amaxes: dict[Numerics, Amax] = {}
        finds = record(lambda: amaxes.update(find_amaxes(values, storage.format, storage.region)))
        writes = record(lambda: storage.quantize_(values, amaxes)) if finds is not None else None
        if finds is not None and writes is not None:
            return _Record(amaxes, finds, writes)
        return _Record(_blank_amaxes(storage, values.device) if shared else {}, [], None)

    def take_first(self) -> Call | None:
        """The first call, which is then no longer here."""
        calls = self.finds or self.writes
        return calls.pop(0) if calls else None

    def replace(self, tensors: Mapping[int, Tensor]) -> None:
        """Other tensors in the place of some, by their ids."""
        self.amaxes = {c: tuple(tensors.get(id(g), g) for g in grids) for c, grids in self.amaxes.items()}
        self.finds = [call.replace(tensors) for call in self.finds]
        self.writes = self.writes and [call.replace(tensors) for call in self.writes]


def _blank_amaxes(storage: QuantizedStorage, device: torch.device) -> dict[Numerics, Amax]:
    """Grids such as `find_amaxes` gives."""
    codecs = dict.fromkeys(storage.format[d].codec for d in storage.format.directions)
    shapes = {c: [[len(span) for span in storage.region.blocks(tile)] for tile in c.amax_tiles] for c in codecs}
    return {c: tuple(torch.empty(shape, device=device) for shape in own) for c, own in shapes.items() if own}


def _lay_together(records: Sequence[_Record], device: torch.device) -> Tensor:
    """Puts all amaxes one behind the other, those that are agreed on first and in their order: one fill clears them.

    What quantizing a part finds twice is found once.
    """
    amaxes = {id(grid): grid for own in records for grid in _in_order(own.amaxes)}
    same: list[tuple[Tensor, int]] = []
    for own in records:
        found: dict[Any, int] = {}
        for call in [call for call in own.writes or [] if call.finds_amaxes]:
            x, _, _, phase, tile, out = call.arguments
            first = found.setdefault((x.data_ptr(), *phase, *tile), id(out))
            if first == id(out):
                amaxes[first] = out
            else:
                same.append((out, first))
                own.writes = [other for other in own.writes or [] if other is not call]
    together = torch.zeros(sum(amax.numel() for amax in amaxes.values()), device=device)
    parts = together.split([amax.numel() for amax in amaxes.values()])
    places = {key: part.view(amax.shape) for (key, amax), part in zip(amaxes.items(), parts, strict=True)}
    places |= {id(out): places[first] for out, first in same}
    for own in records:
        own.replace(places)
    return together


def _in_order(amaxes: Amaxes) -> list[Tensor]:
    return [grid for grids in amaxes.values() for grid in grids]


def _all_slots(amaxes: Amaxes, region: Region, partition: Partition) -> list[_Slots]:
    return [_slots(tile, region, partition) for codec in amaxes for tile in codec.amax_tiles]


def _shared_blocks(spans: Sequence[Span], block: int) -> tuple[int, ...]:
    """Blocks, counted from the start of the whole, that more than one of `spans` holds a part of."""
    if block == WHOLE:
        return (0,) if len(spans) > 1 else ()
    shared: set[int] = set()
    end = 0
    for span in sorted((span for span in spans if len(span)), key=lambda span: span.start):
        blocks = span.blocks(block)
        shared.update(range(blocks.start, min(blocks.stop, end)))
        end = max(end, blocks.stop)
    return tuple(sorted(shared))


def _extents(tile: Pair, partition: Partition) -> list[Span]:
    return [_extent(spans, block) for spans, block in zip((partition.rows, partition.cols), tile, strict=True)]


def _shared(tile: Pair, partition: Partition) -> list[tuple[int, ...]]:
    return [_shared_blocks(spans, block) for spans, block in zip((partition.rows, partition.cols), tile, strict=True)]


def _num_shared(tile: Pair, partition: Partition) -> int:
    """Amaxes of one grid that several parts have a say in."""
    (rows, cols), shared = _extents(tile, partition), _shared(tile, partition)
    return len(shared[0]) * len(cols) + len(rows) * len(shared[1])


@lru_cache(maxsize=4096)
def _slots(tile: Pair, region: Region, partition: Partition) -> _Slots:
    extent, shared = _extents(tile, partition), _shared(tile, partition)
    rows, cols = region.blocks(tile)
    own, slot = [], []
    for at, row in enumerate(shared[0]):  # whole rows of tiles that a row cut goes through
        if rows.start <= row < rows.stop:
            own += [(row - rows.start) * len(cols) + c for c in range(len(cols))]
            slot += [at * len(extent[1]) + c - extent[1].start for c in range(cols.start, cols.stop)]
    offset = len(shared[0]) * len(extent[1])
    for at, col in enumerate(shared[1]):  # whole columns of tiles that a column cut goes through
        if cols.start <= col < cols.stop:
            own += [r * len(cols) + col - cols.start for r in range(len(rows))]
            slot += [offset + (r - extent[0].start) * len(shared[1]) + at for r in range(rows.start, rows.stop)]
    num_amaxes, size = len(rows) * len(cols), _num_shared(tile, partition)
    # NOTE: a part's only tile may be another one than that which others share.
    is_whole = own == slot == list(range(size)) and num_amaxes == size
    return _Slots(num_amaxes, size, torch.tensor(own, dtype=torch.long), torch.tensor(slot, dtype=torch.long), is_whole)


def _extent(spans: Sequence[Span], block: int) -> Span:
    """All blocks that `spans` touch together."""
    blocks = [span.blocks(block) for span in spans]
    start = min(b.start for b in blocks)
    return Span(start, max(b.stop for b in blocks) - start)
