"""Which rows of a matrix each rank of a group holds, when one dimension of the tensor behind it is cut."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from te_dist.formats import WHOLE, Format, Region, Span


@dataclass(frozen=True)
class SequenceCut:
    """A tensor (..., K) of which dimension `dim` is spread over ranks, as `torch.chunk` cuts.

    The matrix behind it has the leading dimensions as rows. A rank holds one run of them for every index of the
    dimensions before `dim`: with (batch, sequence, K) cut along the sequence, one run per sequence of the batch.

    Attributes:
        shape: of the whole tensor.
        dim: the dimension that is cut, not the last.
        num_parts: ranks.
    """

    shape: tuple[int, ...]
    dim: int
    num_parts: int

    def __post_init__(self) -> None:
        if not 0 <= self.dim < len(self.shape) - 1:
            raise ValueError(
                f"dimension {self.dim} of a tensor of shape {self.shape} is no sequence: it has to come before the last"
            )

    @staticmethod
    def of_local(shape: tuple[int, ...], dim: int, *, num_parts: int, size: int | None = None) -> SequenceCut:
        """From the shape of a rank's part; `size` is the whole extent of `dim`, by default that of equal parts."""
        dim %= len(shape)
        size = shape[dim] * num_parts if size is None else size
        return SequenceCut((*shape[:dim], size, *shape[dim + 1 :]), dim, num_parts)

    @cached_property
    def extents(self) -> tuple[Span, ...]:
        """By rank, the part of `dim` it holds."""
        return spans(self.shape[self.dim], self.num_parts)

    @property
    def region(self) -> Region:
        """The whole matrix."""
        return Region.whole(math.prod(self.shape[:-1]), self.shape[-1])

    @cached_property
    def runs(self) -> tuple[tuple[Region, ...], ...]:
        """By rank, the runs of rows it holds, in the order in which they lie in its part; one if there are no rows."""
        if not self.region.rows:
            return ((self.region,),) * self.num_parts
        lead, unit = math.prod(self.shape[: self.dim]), math.prod(self.shape[self.dim + 1 : -1])
        step = self.shape[self.dim] * unit
        return tuple(
            tuple(self.region.narrow(0, i * step + part.start * unit, len(part) * unit) for i in range(lead))
            for part in self.extents
        )

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the part of `rank`."""
        return (*self.shape[: self.dim], len(self.extents[rank]), *self.shape[self.dim + 1 :])

    def check(self, format: Format) -> None:
        """Raises, alike on all ranks, where a run of this cut begins or ends inside a stored byte of `format`."""
        alignment = format.alignment(0)
        edges = (edge for runs in self.runs for run in runs for edge in (run.rows.start, run.rows.stop))
        bad = next((edge for edge in edges if edge % alignment), None)
        if bad is not None:
            raise ValueError(
                f"a sequence of shape {self.shape}, cut along dimension {self.dim} over {self.num_parts} ranks, is cut "
                f"at row {bad} of its matrix, inside a stored byte; this format can be cut at multiples of {alignment} "
                "rows: change the length of the sequence or the number of ranks"
            )

    def cuts_no_tile(self, format: Format) -> bool:
        """Whether every run begins where tiles of `format` begin, so that runs may be quantized side by side."""
        heights = (field.tile[0] for field in format.fields)
        step = math.lcm(*(height for height in heights if height != WHOLE))
        return all(edge % step == 0 for runs in self.runs for run in runs for edge in (run.rows.start, run.rows.stop))

    def side_by_side(self) -> tuple[Region, ...]:
        """By rank, the rows of its part in a matrix of all parts one below the other."""
        regions, start = [], 0
        for runs in self.runs:
            rows = sum(len(run.rows) for run in runs)
            regions.append(Region(Span(start, rows), self.region.cols))
            start += rows
        return tuple(regions)


def spans(extent: int, num_parts: int) -> tuple[Span, ...]:
    """By rank, the part it holds of a dimension of this extent, as `torch.chunk` cuts."""
    return tuple(part.rows for part in Region.whole(extent, 1).chunk(num_parts))
