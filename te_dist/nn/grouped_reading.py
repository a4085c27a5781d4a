"""What the products of linear maps of groups read: inputs and gradients, quantized in groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_dist.codecs.grouped_gemm import Rows, SumsResult, multiply_sums
from te_dist.formats import Direction
from te_dist.ops.source import Source
from te_dist.quantizers import IdentityQuantizer, Quantizer
from te_dist.tensor import GroupedRows, QuantizedStorage

COLUMNWISE = Direction.COLUMNWISE
_ONES = 8  # columns of ones that plain values are summed by: a row of 16 bytes


def operand(storage: QuantizedStorage, direction: Direction) -> Rows:
    """`storage` as a product reads it, which sums over `direction`."""
    sums_over = 1 if direction is Direction.ROWWISE else 0
    return Rows(storage.format[direction], storage.stored(direction), storage.region, sums_over)


class Gradient(NamedTuple):
    """That of the rows of an output, as it was read.

    Attributes:
        rows: quantized, along the directions that are wanted; None for none.
        sums: f32 (G, N), of the columns of every group; None where they are not wanted.
    """

    rows: GroupedRows | None
    sums: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that this holds, but for the group table."""
        codes = () if self.rows is None else self.rows.buffers.values()
        return (*codes, *(() if self.sums is None else (self.sums,)))

    @property
    def kind(self) -> tuple[Any, ...]:
        """What is to be known besides, to put it together again."""
        rows = self.rows
        found = None if rows is None else (rows.format, tuple(rows.buffers), rows.shape, rows.dtype)
        return found, self.sums is not None

    def along(self, direction: Direction) -> QuantizedStorage:
        """What products read along a direction that was wanted, see `GroupedRows.as_matrix`."""
        assert self.rows is not None, "a gradient is multiplied that nobody wanted quantized"
        return self.rows.as_matrix(direction)


def put_together(tensors: Sequence[Tensor], kind: tuple[Any, ...], table: Tensor) -> Gradient:
    """The gradient of these tensors, of which there may be more, of this kind."""
    known, has_sums = kind
    if known is None:
        return Gradient(None, tensors[0] if has_sums else None)
    format, names, shape, dtype = known
    rows = GroupedRows(format, dict(zip(names, tensors, strict=False)), shape, table, dtype)
    return Gradient(rows, tensors[len(names)] if has_sums else None)


def read_gradient(
    grad: Tensor | Source, table: Tensor, *, quantizer: Quantizer, directions: tuple[Direction, ...], sums: bool
) -> Gradient:
    """`grad` along `directions`, and its `sums` where wanted, in one pass over it where the quantizer sees it whole."""
    if sums and directions and quantizer.declare(grad.dtype)[directions[0]].codec.pads_groups:
        return Gradient(*quantizer.encode_groups_and_sum(grad, table, *directions))
    rows = quantizer.encode_groups(grad, table, *directions) if directions else None
    return Gradient(rows, _plain_sums(grad, table) if sums else None)


def _plain_sums(x: Tensor | Source, table: Tensor) -> Tensor:
    """The sums of the columns of every group, f32 (G, N): its product with ones."""
    ones = torch.ones((x.shape[0], _ONES), dtype=x.dtype, device=x.device)
    out = torch.empty((table.shape[1] - 1, _ONES, x.shape[1]), dtype=torch.float32, device=x.device)
    left, right = (
        operand(IdentityQuantizer().encode_groups(side, table, COLUMNWISE).as_matrix(COLUMNWISE), COLUMNWISE)
        for side in (ones, x)
    )
    return multiply_sums(left, right, SumsResult(table, False, out))[:, 0]
