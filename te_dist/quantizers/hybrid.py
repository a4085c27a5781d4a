"""Quantizers of hybrids: rowwise in one format, columnwise in another, either of which may be high precision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from te_dist import catalog
from te_dist.formats import Direction, Format
from te_dist.ops.evaluate import values
from te_dist.ops.source import Source, unsummed
from te_dist.quantizers.base import Quantizer, declared
from te_dist.tensor import GroupedRows, QuantizedStorage, QuantizedTensor, as_matrix

HybridQuantizedTensor = QuantizedTensor  # a hybrid is a format like any other; there is one class of tensors


@dataclass
class IdentityQuantizer(Quantizer):
    """Values as they are, held in `dtype` (default: that of the tensor)."""

    dtype: torch.dtype | None = field(default=None, kw_only=True)

    def declare(self, dtype: torch.dtype) -> Format:
        return declared(catalog.high_precision, self.dtype or dtype)

    def encode_groups(self, x: Tensor | Source, table: Tensor, *directions: Direction) -> GroupedRows:
        """As every quantizer; values that have the type already are taken as they are, not copied."""
        format = self.declare(x.dtype)
        (field,) = format.canonical.fields
        if x.dtype != field.dtype:
            return super().encode_groups(x, table, *directions)
        shape = (x.shape[0], x.shape[1])
        matrix = as_matrix(values(x), shape)
        assert isinstance(matrix, Tensor)
        return GroupedRows(format, {field.name: matrix}, shape, table, x.dtype)


@dataclass(kw_only=True)
class HybridQuantizer(Quantizer):
    """The rowwise direction of one quantizer beside the columnwise direction of another.

    Attributes:
        rowwise_quantizer: writes the rowwise direction.
        columnwise_quantizer: writes the columnwise direction.
        columnwise_source: what the latter is given: the tensor, or the values that the rowwise direction stands for,
            so that backward sees the errors of forward.
    """

    rowwise_quantizer: Quantizer
    columnwise_quantizer: Quantizer
    columnwise_source: Literal["original", "rowwise_dequantized"] = "original"

    def __post_init__(self) -> None:
        for name in ("rowwise_quantizer", "columnwise_quantizer"):
            if not isinstance(found := getattr(self, name), Quantizer):
                raise TypeError(
                    f"{name}: got {found!r}, wanted a quantizer (te_dist.quantizers), not a recipe or a name"
                )
        if self.rowwise_quantizer is self.columnwise_quantizer:
            raise ValueError("rowwise_quantizer and columnwise_quantizer are one object: pass a .copy() of it as one")
        if self.columnwise_source not in ("original", "rowwise_dequantized"):
            raise ValueError(
                f'columnwise_source is "original" or "rowwise_dequantized", got {self.columnwise_source!r}'
            )

    def declare(self, dtype: torch.dtype) -> Format:
        return declared(catalog.hybrid, self.rowwise_quantizer.declare(dtype), self.columnwise_quantizer.declare(dtype))

    @property
    def writes_by_format(self) -> bool:
        parts = self.rowwise_quantizer, self.columnwise_quantizer
        is_plain = type(self).write is HybridQuantizer.write and self.columnwise_source == "original"
        return is_plain and all(part.writes_by_format for part in parts)

    @property
    def settles(self) -> bool:
        return self.rowwise_quantizer.settles and self.columnwise_quantizer.settles

    @property
    def takes_groups(self) -> bool:
        if type(self) is not HybridQuantizer or self.columnwise_source != "original":
            return False
        return self.rowwise_quantizer.takes_groups and self.columnwise_quantizer.takes_groups

    def write(self, x: Tensor | Source, storage: QuantizedStorage) -> None:
        for direction in storage.directions:
            part = storage.select(direction)
            if direction is Direction.ROWWISE:
                self.rowwise_quantizer.write(x, part)
                x = unsummed(x)
            else:
                self.columnwise_quantizer.write(self._columnwise_values(x, storage), part)

    def write_groups(self, x: Tensor | Source, rows: GroupedRows) -> None:
        directions = rows.format.directions
        if Direction.ROWWISE in directions:
            self.rowwise_quantizer.write_groups(x, rows.select(Direction.ROWWISE))
            x = unsummed(x)
        if Direction.COLUMNWISE not in directions:
            return
        if self.columnwise_source == "rowwise_dequantized":
            rowwise = rows
            if Direction.ROWWISE not in directions:
                rowwise = self.rowwise_quantizer.encode_groups(x, rows.table, Direction.ROWWISE)
            x = rowwise.row_values()
        self.columnwise_quantizer.write_groups(x, rows.select(Direction.COLUMNWISE))

    def _columnwise_values(self, x: Tensor | Source, storage: QuantizedStorage) -> Tensor | Source:
        if self.columnwise_source == "original":
            return x
        if Direction.ROWWISE in storage.directions:
            return storage.dequantize(x.dtype, Direction.ROWWISE)
        rowwise = storage.blank(self.rowwise_quantizer.declare(x.dtype).select(Direction.ROWWISE))
        self.rowwise_quantizer.write(x, rowwise)
        return rowwise.dequantize()
