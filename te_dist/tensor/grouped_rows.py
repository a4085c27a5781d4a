"""GroupedRows: a matrix whose rows belong to groups, quantized so that no scale covers rows of two groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from te_dist.formats import WHOLE, Direction, Encoding, Format, Region, Span
from te_dist.formats.region import Pair
from te_dist.ops.group_table import padded_rows
from te_dist.tensor.storage import QuantizedStorage


@dataclass(frozen=True)
class GroupedRows:
    """Rows (T, K) in groups, quantized.

    The rowwise direction lies as that of a matrix. What covers several rows of a group, and the columnwise direction,
    lies as that of a matrix in which every group begins at a tile of 128 rows and zeros follow its last row; it has as
    many rows as any sizes of groups can need. What is one value for a matrix is one for each group, (G,).

    Attributes:
        format: what is declared.
        buffers: by field name.
        shape: (T, K).
        table: int32 (4, G + 1), see `ops.group_table`.
        dtype: floating-point type of the values this stands for.
    """

    format: Format
    buffers: dict[str, Tensor]
    shape: Pair
    table: Tensor
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def num_groups(self) -> int:
        return self.table.shape[1] - 1

    def stored(self, direction: Direction) -> tuple[Tensor, ...]:
        """The stored tensors of `direction`, in the order of its fields."""
        return tuple(map(self.buffers.__getitem__, self.format[direction].names))

    def select(self, *directions: Direction) -> GroupedRows:
        """The same buffers, seen as a format of `directions` only."""
        part = self.format.select(*directions)
        buffers = {name: self.buffers[name] for d in directions for name in part[d].names}
        return GroupedRows(part, buffers, self.shape, self.table, self.dtype)

    def as_matrix(self, direction: Direction) -> QuantizedStorage:
        """The buffers of `direction` as one matrix, that of its padded rows: what autograd saves, and hooks see."""
        part = self.select(direction)
        rows = _rows(part.format[direction], direction, self.shape, self.num_groups)
        return QuantizedStorage(part.format, part.buffers, Region.whole(rows, self.shape[1]), dtype=self.dtype)

    def row_values(self) -> Tensor:
        """What the rowwise direction stands for, (T, K); behind the last group, anything.

        Raises:
            NotImplementedError: the values of a group have a scale in common.
        """
        part = self.select(Direction.ROWWISE)
        encoding = part.format[Direction.ROWWISE]
        if any(field.grain[0] != 1 for field in encoding.fields):
            raise NotImplementedError(
                f"rows in groups of {encoding.codec} cannot be dequantized, since rows share a scale; take the "
                'columnwise direction from the original values (columnwise_source="original"), or another format'
            )
        return QuantizedStorage(part.format, part.buffers, Region.whole(*self.shape), dtype=self.dtype).dequantize()


def empty_rows(format: Format, shape: Pair, table: Tensor, *, dtype: torch.dtype) -> GroupedRows:
    """Uninitialised buffers for rows of this shape (T, K) in the groups of `table`, on its device.

    Raises:
        ValueError: both directions store one field, which groups need twice.
    """
    made = _known(format, shape, table.shape[1] - 1)
    buffers = {name: torch.empty(extents, dtype=kind, device=table.device) for name, (extents, kind) in made.items()}
    return GroupedRows(format, buffers, shape, table, dtype)


def _rows(encoding: Encoding, direction: Direction, shape: Pair, num_groups: int, grain: int = 1) -> int:
    """Rows of the matrix that fields whose values cover `grain` rows are laid out for."""
    is_padded = encoding.codec.pads_groups and (direction is Direction.COLUMNWISE or grain != 1)
    return padded_rows(shape[0], num_groups) if is_padded else shape[0]


def allocations(format: Format, shape: Pair, num_groups: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """(shape, dtype) of every field, by name. `shape`: (T, K), which may be a compiler's symbols."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for direction in format.directions:
        encoding = format[direction]
        for field in encoding.fields:
            extents: tuple[int, ...] = (num_groups,)
            if field.grain != (WHOLE, WHOLE):
                rows = _rows(encoding, direction, shape, num_groups, field.grain[0])
                extents = field.shape_of(rows, Span(0, shape[1]))
            if found.setdefault(field.name, (extents, field.dtype)) != (extents, field.dtype):
                raise ValueError(
                    f"field {field.name!r} serves both directions, which lie differently in groups of rows; declare a "
                    "field for each"
                )
    return found


_known = lru_cache(maxsize=4096)(allocations)
