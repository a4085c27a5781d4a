"""Rows sent to the ranks of their experts and back, as autograd sees it.

Shapes: P ranks, S source rows, k copies of each, H columns.

[Note: Gradients of experts over ranks]
Data parallelism takes the mean of gradients over ranks, each of which has a loss of its own. Weights of experts that P
ranks share see the rows of all of them, so that their gradients would be sums over P losses. Gradients are divided by P
on their way to the experts and multiplied by P on their way back: those of weights are means over the P ranks, whatever
shards these further takes the mean over the others, and those of rows are what they were. P is a power of two as a
rule, and then nothing is rounded. Where Q ranks each have parts of the same sequences there are P / Q losses, and by
these gradients are divided: what comes of the Q parts of a loss is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from te_dist.kernels.tape import Tapes, communicate
from te_dist.nn.group_fronts import gather_sum
from te_dist.nn.moe.permutation import Permutation, taken
from te_dist.nn.once import once_differentiable

_tapes = Tapes(max_tapes=1024)
_all_to_all: Callable[..., Any] = dist.all_to_all_single


class Carrier(Protocol):
    """The way of rows to other ranks, and back. Methods are collective."""

    @property
    def num_losses(self) -> float:
        """P, or P / Q, or what was asked for. See [Note: Gradients of experts over ranks]."""
        ...

    @property
    def is_regular(self) -> bool:
        """Whether messages have the same sizes whenever rows have the same shape, so that they can be recorded."""
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
        num_losses: see `Carrier`.
        num_sent, num_received: rows of this rank, before and after.
        sent, received: of these, rows by rank, before rows that are nobody's; None for equal parts.
        has_spare_row: whether a row of zeros follows rows that came back: that of copies which were never sent.
    """

    group: dist.ProcessGroup
    num_losses: float
    num_sent: int
    num_received: int
    sent: tuple[int, ...] | None = None
    received: tuple[int, ...] | None = None
    has_spare_row: bool = False

    @property
    def is_regular(self) -> bool:
        """See `Carrier`."""
        return self.sent is None

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        """(num_received, ...): the rows `index` (num_sent,) of `x`, nobody's rows zero. Collective."""
        rows = _chosen_rows(x, index)
        out = rows.new_empty(self.num_received, *rows.shape[1:])
        arriving = self._of_ranks(out, self.received)
        if len(arriving) < len(out):
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
        names = "output_split_sizes", "input_split_sizes"
        sizes = {} if sent is None else dict(zip(names, map(list, (received, sent)), strict=True))
        communicate(partial(_all_to_all, group=self.group, **sizes), out, rows.contiguous())


def _chosen_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of `x`; slots that stay empty ask for the first one, which a rank without rows does not have."""
    return x.index_select(0, index) if x.shape[0] else x.new_zeros(index.shape[0], *x.shape[1:])


def send_rows(x: Tensor, outgoing: Permutation, *, by: Carrier, beside: Tensor) -> Tensor:
    """(num_received, H): copies of rows of `x` (S, H), sent in the order of `outgoing`, as they arrive.

    `beside`: their probabilities, by which routers are trained on every rank. So the gradient of rows is sent back also
    where the rows of this rank want none: other ranks wait for it.
    """
    return _SendRows.apply(x, beside, outgoing, by)


def send_values(values: Tensor, outgoing: Permutation, *, by: Exchange) -> Tensor:
    """f32 (num_received,): the values of copies, f32 (S, k), that `send_rows` sends."""
    return _SendValues.apply(values, outgoing, by)


def bring_back(rows: Tensor, outgoing: Permutation, *, by: Carrier) -> Tensor:
    """(S, H): sums of copies of rows (num_received, H), which travel back to where they were sent from."""
    return _BringBack.apply(rows, outgoing, by)


def values_of_copies(
    own: Tensor, values: Tensor, incoming: Permutation, *, outgoing: Permutation, by: Carrier
) -> Tensor:
    """f32 (R,): of sorted copies, which `incoming` sorts, among the values (S, k) of rows that arrived.

    Copies that rows have elsewhere are nowhere to `incoming`; each copy is somewhere.

    Args:
        own: (T, k), values of the copies of this rank's rows, which get the gradients of theirs.
        values: f32 (S, k), as they arrived.
        incoming: sorts copies of what arrived.
        outgoing: of rows of this rank, brought there `by`; positions (T, P), where what comes back is.
    """
    return _ValuesOfCopies.apply(own, values, incoming, outgoing.positions, by)


def _repeated(key: str, by: Carrier, tensors: tuple[Tensor, ...], function: Callable[[], Tensor]) -> Tensor:
    """What `function` of `tensors` returns. Where messages are regular it is recorded, and played later."""
    if not by.is_regular:
        return function()
    (found,), _ = _tapes.run((key, by), tensors, lambda: ((function(),), None))
    return found


def _brought_back(rows: Tensor, positions: Tensor, by: Carrier) -> Tensor:
    """Sums over what comes back of `rows`, at the positions of each row of this rank."""
    return gather_sum(by.send_back(rows), positions)


def gradients_back(grad: Tensor, positions: Tensor, by: Carrier) -> Tensor:
    """Of rows of this rank, of those of their copies `grad`. See [Note: Gradients of experts over ranks]."""
    found = _brought_back(grad, positions, by)
    return found if by.num_losses == 1 else found * by.num_losses


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, beside: Tensor, outgoing: Permutation, by: Carrier) -> Tensor:
        ctx.by = by
        ctx.save_for_backward(outgoing.positions)
        return by.take(x, outgoing.index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        given: tuple[Tensor, Tensor] = grad, *ctx.saved_tensors
        return _repeated("rows", ctx.by, given, lambda: gradients_back(*given, ctx.by)), None, None, None


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
        return ctx.by.send_back(grad)[positions] * ctx.by.num_losses, None, None


class _ValuesOfCopies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, values: Tensor, incoming: Permutation, own_positions: Tensor, by: Carrier
    ) -> Tensor:
        ctx.by = by
        ctx.save_for_backward(incoming.positions, own_positions)
        return taken(values, incoming.choices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        given: tuple[Tensor, Tensor, Tensor] = grad.contiguous(), *ctx.saved_tensors
        return _repeated("values", ctx.by, given, lambda: _values_back(*given, ctx.by)), None, None, None, None


def _values_back(grad: Tensor, positions: Tensor, own_positions: Tensor, by: Carrier) -> Tensor:
    """Zeros come from where a copy is not."""
    return gradients_back(taken(grad, positions), own_positions, by)


class _BringBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, outgoing: Permutation, by: Carrier) -> Tensor:
        ctx.by = by
        ctx.save_for_backward(outgoing.index)
        given = rows, outgoing.positions
        return _repeated("sums", by, given, lambda: _brought_back(*given, by))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        given: tuple[Tensor, Tensor] = grad, *ctx.saved_tensors
        return _repeated("gradients of sums", ctx.by, given, lambda: _gradients_there(*given, ctx.by)), None, None


def _gradients_there(grad: Tensor, index: Tensor, by: Carrier) -> Tensor:
    """See [Note: Gradients of experts over ranks]."""
    return by.take(grad if by.num_losses == 1 else grad / by.num_losses, index)
