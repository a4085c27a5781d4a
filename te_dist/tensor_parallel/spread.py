"""Storages of parts that ranks hold of one matrix: quantizing into them gives the bytes of the whole.

A quantizer writes into a storage; these storages agree with those of the other ranks on every amax that parts share
before any code is written. So it works for whatever quantizer, and none has to know of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from te_dist.codecs import Amax
from te_dist.formats import WHOLE, Direction, Field, Format, Partition, Region, Span
from te_dist.formats.field import Numerics
from te_dist.ops.evaluate import values
from te_dist.ops.source import Source
from te_dist.scaling.agreement import Entry, agree, shares_scales
from te_dist.tensor import Amaxes, QuantizedStorage, QuantizedTensor, collectives, empty, find_amaxes
from te_dist.tensor.storage import How


class Writer(Protocol):
    """What is asked of a quantizer here."""

    def declare(self, dtype: torch.dtype) -> Format:
        """Every direction it can write."""
        ...

    def write(self, x: Tensor, storage: QuantizedStorage) -> None:
        """Quantizes into every direction that `storage` has."""
        ...


class SpreadStorage(QuantizedStorage):
    """A part of a matrix. Quantizing into it is collective over the ranks that hold the others.

    Attributes:
        partition: how the matrix is cut.
        group: its ranks.
        origin: what this is a selection of directions of; itself, where it has all.
        agreed: of the origin, whether scales were found from amaxes, and so agreed on; False where a quantizer brought
            its own.
    """

    __slots__ = ("agreed", "group", "origin", "partition")

    def __init__(
        self,
        plain: QuantizedStorage,
        partition: Partition,
        group: dist.ProcessGroup,
        *,
        origin: SpreadStorage | None = None,
    ) -> None:
        super().__init__(plain.format, plain.buffers, plain.region, dtype=plain.dtype)
        self.partition, self.group = partition, group
        self.origin, self.agreed = origin or self, False

    def quantize_(self, x: Tensor | Source, amaxes: Amaxes | None = None) -> None:
        if amaxes is None:
            shared = shares_scales(self.format, self.partition)
            amaxes = find_amaxes(x, self.format, self.region) if shared else {}
        agree([Entry(amaxes, self.region, self.partition)], [self.group])
        super().quantize_(x, amaxes)
        self.origin.agreed = True

    def blank(
        self, format: Format, *, device: torch.device | str | None = None, fields: Iterable[Field] = ()
    ) -> SpreadStorage:
        plain = super().blank(format, device=device, fields=fields)
        return SpreadStorage(plain, self.partition, self.group)

    def select(self, *directions: Direction) -> SpreadStorage:
        return SpreadStorage(super().select(*directions), self.partition, self.group, origin=self.origin)

    def cut_into(self, runs: Sequence[Region]) -> list[QuantizedStorage]:
        """A plain storage for each of `runs` of equal length, whose rows lie in this one in their order."""
        if len(runs) == 1:
            return [self.plain()]
        length = len(runs[0].rows)
        pieces = [self.narrow(0, index * length, length).buffers for index in range(len(runs))]
        return [QuantizedStorage(self.format, b, run, dtype=self.dtype) for b, run in zip(pieces, runs, strict=True)]

    def plain(self) -> QuantizedStorage:
        """The same buffers without the ranks."""
        return QuantizedStorage(self.format, self.buffers, self.region, dtype=self.dtype)


class RunsStorage(SpreadStorage):
    """Several runs of rows of one matrix, where cuts between runs go through tiles.

    A tile may then have rows of several runs of several ranks: amaxes are put in their places in the grid of the whole
    matrix, and that is reduced.

    Attributes:
        runs: a storage for each run, in the order in which their rows come.
    """

    __slots__ = ("runs",)

    def __init__(
        self,
        runs: Sequence[QuantizedStorage],
        whole: Region,
        group: dist.ProcessGroup,
        *,
        origin: SpreadStorage | None = None,
    ) -> None:
        first = runs[0]
        plain = QuantizedStorage(first.format, first.buffers, whole, dtype=first.dtype)
        super().__init__(plain, Partition((whole.rows,), (whole.cols,)), group, origin=origin)
        self.runs = tuple(runs)

    def quantize_(self, x: Tensor | Source, amaxes: Amaxes | None = None) -> None:
        rows = values(x).reshape(-1, x.shape[-1]).split([len(run.region.rows) for run in self.runs])
        found = [find_amaxes(part, self.format, run.region) for part, run in zip(rows, self.runs, strict=True)]
        grids = {codec: self._reduced(codec, [f[codec] for f in found]) for codec in found[0]}
        for part, run in zip(rows, self.runs, strict=True):
            run.quantize_(part, {codec: self._of_run(codec, grid, run.region) for codec, grid in grids.items()})
        self.origin.agreed = True

    def blank(
        self, format: Format, *, device: torch.device | str | None = None, fields: Iterable[Field] = ()
    ) -> RunsStorage:
        fields = tuple(fields)
        runs = [run.blank(format, device=device, fields=fields) for run in self.runs]
        return RunsStorage(runs, self.region, self.group)

    def select(self, *directions: Direction) -> RunsStorage:
        return RunsStorage([run.select(*directions) for run in self.runs], self.region, self.group, origin=self.origin)

    def cut_into(self, runs: Sequence[Region]) -> list[QuantizedStorage]:
        return list(self.runs)

    def _decoded(self, how: How, dtype: torch.dtype | None, direction: Direction | None) -> Tensor:
        return torch.cat([run._decoded(how, dtype, direction) for run in self.runs])

    def _of_run(self, codec: Numerics, grids: Amax, run: Region) -> Amax:
        tiles = zip(grids, codec.amax_tiles, strict=True)
        return tuple(_window(grid, self.region, run, tile).contiguous() for grid, tile in tiles)

    def _reduced(self, codec: Numerics, found: Sequence[Amax]) -> Amax:
        """Grids of the whole matrix with the amaxes of all ranks."""
        grids = []
        for index, tile in enumerate(codec.amax_tiles):
            rows, cols = self.region.blocks(tile)
            grid = torch.zeros(len(rows), len(cols), dtype=torch.float32, device=found[0][index].device)
            for amax, run in zip(found, self.runs, strict=True):
                window = _window(grid, self.region, run.region, tile)
                torch.maximum(window, amax[index], out=window)
            if tile[0] != 1:  # a tile of one row lies in one run
                collectives.maximum_(grid, self.group)
            grids.append(grid)
        return tuple(grids)


class PlacedQuantizer:
    """A quantizer of tensors of which each rank holds some rows or columns: of weights, and of what meets them.

    Attributes:
        inner: the quantizer as the recipe has it.
        dim: 0 where ranks hold rows, 1 where they hold columns.
        spans: by rank, which.
        group: the ranks.
        agrees: whether these agree on scales, see `alone`.
    """

    def __init__(self, inner: Any, dim: int, spans: tuple[Span, ...], *, group: dist.ProcessGroup) -> None:
        self.inner, self.dim, self.spans, self.group, self.agrees = inner, dim, spans, group, True

    def declare(self, dtype: torch.dtype) -> Format:
        """That of the quantizer."""
        return self.inner.declare(dtype)

    def encode(self, x: Tensor, *directions: Direction) -> QuantizedStorage:
        """Quantizes this rank's part `x` (rows, cols) as it would be in the whole. Collective."""
        format = self.declare(x.dtype).select(*directions)
        self._check(format)
        others = Span(0, x.shape[1 - self.dim])
        regions = [Region(span, others) if self.dim == 0 else Region(others, span) for span in self.spans]
        own = regions[dist.get_rank(self.group)]
        storage = blank_part(x, format, own)
        if not self.agrees:
            self.inner.write(x, storage)
            return storage
        spread = SpreadStorage(storage, Partition.of(regions), self.group)
        self.inner.write(x, spread)
        return spread.plain()

    @property
    def draws(self) -> bool:
        """See `Quantizer`."""
        return self.inner.draws

    def is_alike(self, dtype: torch.dtype) -> bool:
        """Whether what all ranks hold of values of this type has the same shapes, scales too."""
        fields, others = self.declare(dtype).fields, Span(0, 1)
        regions = (Region(span, others) if self.dim == 0 else Region(others, span) for span in self.spans)
        return len({tuple(field.shape(region) for field in fields) for region in regions}) == 1

    @property
    def alone(self) -> PlacedQuantizer:
        """One that asks no other rank, whose bytes are not those of the whole; for their number and types."""
        quantizer = PlacedQuantizer(self.inner, self.dim, self.spans, group=self.group)
        quantizer.agrees = False
        return quantizer

    def _check(self, format: Format) -> None:
        alignment = format.alignment(self.dim)
        bad = next((s for s in self.spans if s.start % alignment or s.stop % alignment), None)
        if bad is not None:
            what = ("rows", "columns")[self.dim]
            raise ValueError(
                f"{what} {bad.start} to {bad.stop} of {self.spans[-1].stop} are one rank's, which cuts inside a stored "
                f"byte: this format can be cut at multiples of {alignment} {what}; change the number of features or of "
                "ranks"
            )


class GatheredQuantizer:
    """A quantizer of gradients that every rank has all of: quantized, where they were gathered so, or plain."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def declare(self, dtype: torch.dtype) -> Format:
        """That of the quantizer."""
        return self.inner.declare(dtype)

    @property
    def draws(self) -> bool:
        """See `Quantizer`."""
        return self.inner.draws

    def encode(self, x: Tensor, *directions: Direction) -> QuantizedStorage:
        """Quantizes `x`, unless it is quantized."""
        return x.storage if isinstance(x, QuantizedTensor) else self.inner.encode(x, *directions)


class FormatWriter:
    """A writer of one format, for those who have a format and no recipe."""

    def __init__(self, format: Format) -> None:
        self.format = format

    def declare(self, dtype: torch.dtype) -> Format:
        """The format."""
        return self.format

    def write(self, x: Tensor, storage: QuantizedStorage) -> None:
        """Quantizes `x` into `storage`."""
        storage.quantize_(x)


def check_shared_scales(storage: SpreadStorage, scaled_by: dist.ProcessGroup | None) -> None:
    """Raises, alike on all ranks, where parts are put together whose scales nothing keeps equal.

    Args:
        scaled_by: the ranks that keep scales of past steps in common.
    """
    shared = any(field.is_shared(0) for field in storage.format.fields)
    if storage.agreed or not shared or (scaled_by is not None and _ranks(storage.group) <= _ranks(scaled_by)):
        return
    raise ValueError(
        "each rank of this group scales by a history of its own, so its bytes mean something else on the others; give "
        "autocast an amax_reduction_group that holds the tensor-parallel ranks"
    )


def _ranks(group: dist.ProcessGroup) -> set[int]:
    return set(dist.get_process_group_ranks(group))


def blank_part(x: Tensor, format: Format, region: Region) -> QuantizedStorage:
    """Uninitialised canonical buffers for values like `x` that lie in `region`."""
    return empty(format, region, dtype=x.dtype, device=x.device, fields=format.canonical.fields)


def _window(grid: Tensor, whole: Region, part: Region, tile: tuple[int, int]) -> Tensor:
    """View of the tiles of `part` in the grid of `whole`."""
    slices = []
    for own, all_, block in zip(part.blocks(tile), whole.blocks(tile), tile, strict=True):
        start = 0 if block == WHOLE else own.start - all_.start
        slices.append(slice(start, start + len(own)))
    return grid[tuple(slices)]
