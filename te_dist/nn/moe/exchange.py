"""Rows sent to the ranks of their experts and back, as autograd sees it.

Shapes: P ranks, S source rows, k copies of each, H columns.

[Note: Gradients of experts over ranks]
Data parallelism takes the mean of gradients over ranks, each of which has a loss of its own. Weights of experts that P
ranks share see the rows of all of them, so that their gradients would be sums over P losses. Gradients are divided by P
on their way to the experts and multiplied by P on their way back: those of weights are means over the P ranks, whatever
shards these further takes the mean over the others, and those of rows are what they were. P is a power of two as a
rule, and then nothing is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from te_dist.nn.moe.permutation import Permutation, gather_sum
from te_dist.nn.once import once_differentiable


class Carrier(Protocol):
    """The way of rows to other ranks, and back. Methods are collective."""

    @property
    def num_ranks(self) -> int:
        """P."""
        ...

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        """The rows `index` of `x` (S, ...), as they arrive."""
        ...

    def send_back(self, rows: Tensor) -> Tensor:
        """What ranks make of the rows that were taken to them, (arrived, ...), as it comes back."""
        ...


@dataclass(frozen=True)
class Exchange:
    """One all-to-all of rows, and the way back. See `Carrier`.

    Attributes:
        group: the P ranks.
        num_ranks: P.
        num_sent, num_received: rows of this rank, before and after.
        sent, received: of these, rows by rank, before rows that are nobody's; None for equal parts.
        has_spare_row: whether a row of zeros follows rows that came back: that of copies which were never sent.
    """

    group: dist.ProcessGroup
    num_ranks: int
    num_sent: int
    num_received: int
    sent: tuple[int, ...] | None = None
    received: tuple[int, ...] | None = None
    has_spare_row: bool = False

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        """(num_received, ...): rows of `x`, nobody's rows zero. Collective."""
        return self.send(chosen_rows(x, index))

    def send(self, rows: Tensor) -> Tensor:
        """(num_received, ...) of (num_sent, ...), nobody's rows zero. Collective."""
        out = rows.new_empty(self.num_received, *rows.shape[1:])
        arriving = self._of_ranks(out, self.received)
        out[len(arriving) :].zero_()
        self._swap(arriving, rows, self.received, self.sent)
        return out

    def send_back(self, rows: Tensor) -> Tensor:
        """(num_sent, ...), and a row of zeros where there is a spare one, of (num_received, ...). Collective."""
        out = rows.new_empty(self.num_sent + self.has_spare_row, *rows.shape[1:])
        if self.has_spare_row:
            out[-1].zero_()
        self._swap(out[: self.num_sent], self._of_ranks(rows, self.received), self.sent, self.received)
        return out

    @staticmethod
    def _of_ranks(rows: Tensor, sizes: tuple[int, ...] | None) -> Tensor:
        """The rows that are somebody's."""
        return rows if sizes is None else rows[: sum(sizes)]

    def _swap(self, out: Tensor, rows: Tensor, received: Any, sent: Any) -> None:
        sizes = [None if each is None else list(each) for each in (received, sent)]
        dist.all_to_all_single(out, rows.contiguous(), *sizes, group=self.group)


def chosen_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of `x`; slots that stay empty ask for the first one, which a rank without rows does not have."""
    return x.index_select(0, index) if x.shape[0] else x.new_zeros(index.shape[0], *x.shape[1:])


def send_rows(x: Tensor, outgoing: Permutation, *, by: Carrier, beside: Tensor) -> Tensor:
    """(num_received, H): copies of rows of `x` (S, H), sent in the order of `outgoing`, as they arrive.

    `beside`: their probabilities, by which routers are trained on every rank. So the gradient of rows is sent back also
    where the rows of this rank want none: other ranks wait for it.
    """
    return _SendRows.apply(x, beside, outgoing, by)


def send_values(values: Tensor, outgoing: Permutation, *, by: Carrier) -> Tensor:
    """f32 (num_received,): the values of copies, f32 (S, k), that `send_rows` sends."""
    return _SendValues.apply(values, outgoing, by)


def bring_back(rows: Tensor, outgoing: Permutation, *, by: Carrier) -> Tensor:
    """(S, H): sums of copies of rows (num_received, H), which travel back to where they were sent from."""
    return _BringBack.apply(rows, outgoing, by)


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, beside: Tensor, outgoing: Permutation, by: Carrier) -> Tensor:
        ctx.by = by
        ctx.save_for_backward(outgoing.positions)
        return by.take(x, outgoing.index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (positions,) = ctx.saved_tensors
        # See [Note: Gradients of experts over ranks].
        return gather_sum(ctx.by.send_back(grad), positions) * ctx.by.num_ranks, None, None, None


class _SendValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, outgoing: Permutation, by: Exchange) -> Tensor:
        ctx.by = by
        ctx.save_for_backward(outgoing.positions)
        return by.take(values.flatten(), outgoing.choices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (positions,) = ctx.saved_tensors
        return ctx.by.send_back(grad)[positions] * ctx.by.num_ranks, None, None


class _BringBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, outgoing: Permutation, by: Carrier) -> Tensor:
        ctx.by = by
        ctx.save_for_backward(outgoing.index)
        return gather_sum(by.send_back(rows), outgoing.positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return ctx.by.take(grad / ctx.by.num_ranks, index), None, None
