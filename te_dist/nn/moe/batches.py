"""Batches of all ranks on every rank: nothing waits for sizes before rows travel, and none are sorted to be sent.

Shapes: T tokens of each rank, k choices of each, P ranks, L experts of a rank, H columns; R copies that are made here.

[Note: Batches that travel]
Every rank gets the tokens of all ranks with their choices, copies those that its experts have, sums what these make of
each token, and sends the sums of a rank's tokens back to it: an all-gather one way, an all-to-all of equal parts the
other way, and the same for gradients. Experts see the rows they see where tokens travel once (see [Note: Tokens that
travel once]), in the same order, and sums are rounded alike, to the bit. P messages are made of a token, instead of
P (1 - (1 - 1/P)^k): nearly the same number over few ranks, where most ranks have one of its experts anyway. How many
copies a rank makes is told to the host while tokens travel, or bounded by a capacity: then nothing waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_dist.nn.moe.dispatch import AllToAllDispatcher, Arrived, refuse_graphs, rounded
from te_dist.nn.moe.exchange import send_rows
from te_dist.nn.moe.payload import Route, check_rows, send_quantized
from te_dist.nn.moe.permutation import Permutation, sort_by_expert
from te_dist.nn.moe.router import Routed
from te_dist.nn.once import once_differentiable
from te_dist.quantizers import Quantizer
from te_dist.tensor import collectives


@dataclass(frozen=True)
class Gathering:
    """Rows of all ranks, one rank after the other, and the way back. See `Carrier`.

    Attributes:
        group: the P ranks.
        num_ranks: P.
    """

    group: dist.ProcessGroup
    num_ranks: int

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        """(P T, ...) of (T, ...), all of them, whatever `index` is. Collective."""
        return collectives.all_gather(x.contiguous(), self.group)

    def send_back(self, rows: Tensor) -> Tensor:
        """(P T, ...) of (P T, ...): what each rank has for the tokens of this one. Collective."""
        out = torch.empty_like(rows)
        dist.all_to_all_single(out, rows, group=self.group)
        return out


class BatchDispatcher(AllToAllDispatcher):
    """See [Note: Batches that travel]. All ranks have equally many tokens.

    Attributes:
        capacity: C, of which a rank has P for copies, whoever sends their tokens; or None for no limit.
    """

    @property
    def sorts(self) -> tuple[int, ...]:
        """See `Dispatcher`."""
        return (self.num_local_experts,)

    def dispatch(self, x: Tensor, routed: Routed, *, quantizer: Quantizer | None = None) -> Arrived:
        """See `AllToAllDispatcher.dispatch`; `dropped` are copies for experts of this rank, of whichever tokens."""
        if quantizer is not None:
            check_rows(quantizer, x.dtype)
        if self.capacity is None:
            refuse_graphs(routed.experts)
        by, (tokens, top_k) = Gathering(self.group, self.num_ranks), routed.experts.shape
        with torch.no_grad():
            choices = collectives.all_gather(torch.cat((routed.probabilities, routed.experts), dim=1), self.group)
            own, dropped = self._own(choices[:, top_k:])
            found = sort_by_expert(own, self.num_local_experts)
            places = torch.arange(len(choices), device=x.device).view(self.num_ranks, tokens).T.contiguous()
            outgoing = Permutation(places[:, 0], places[:, 0], places, found.counts)
            number = None if self.capacity is not None else _Number(found.counts.sum())
        rows: Tensor | None = None
        if quantizer is None:
            rows = send_rows(x, outgoing, by=by, beside=routed.probabilities)
        num_copies = self._num_copies(number, own.numel())
        with torch.no_grad():
            positions = torch.where(own < 0, own.numel(), found.positions)
            index, of_rows = found.index[:num_copies].clone(), found.choices[:num_copies].clone()
            incoming = Permutation(index, of_rows, positions, found.counts)
        if quantizer is not None:
            route = Route(outgoing, incoming, by)
            rows = send_quantized(x, route, quantizer=quantizer, beside=routed.probabilities)
        assert rows is not None
        owners = routed.experts // self.num_local_experts
        probabilities = _TakeValues.apply(
            routed.probabilities, choices[:, :top_k], of_rows, places.gather(1, owners), by
        )
        return Arrived(rows, incoming, probabilities, outgoing=outgoing, exchange=by, dropped=dropped)

    def _own(self, experts: Tensor) -> tuple[Tensor, Tensor | None]:
        """int64 (P T, k): numbers among experts here, -1 for others and for what is dropped; how many that are."""
        local = experts.long() - self.mesh.get_local_rank() * self.num_local_experts
        here = (local >= 0) & (local < self.num_local_experts)
        if self.capacity is None:
            return torch.where(here, local, -1), None
        before = here.T.flatten().cumsum(0)  # all first choices before all second ones
        kept = here & (self.capacity * self.num_ranks >= before.view_as(here.T).T)
        return torch.where(kept, local, -1), here.sum() - kept.sum()

    def _num_copies(self, number: _Number | None, most: int) -> int:
        """R, at most `most`; rows that are nobody's among them."""
        if number is None:
            assert self.capacity is not None
            return min(self.capacity * self.num_ranks, most)
        self.num_host_syncs += 1
        return min(rounded(number.wait()), most)


class _Number:
    """A number on its way to the host, while the device goes on."""

    def __init__(self, scalar: Tensor) -> None:
        self._copy = scalar.to("cpu", non_blocking=True)
        self._there = torch.cuda.current_stream(scalar.device).record_event() if scalar.is_cuda else None

    def wait(self) -> int:
        """The number, once it is there."""
        if self._there is not None:
            self._there.synchronize()
        return int(self._copy)


class _TakeValues(torch.autograd.Function):
    """Values of copies that are made here, of those of all ranks, (P T, k); gradients go back to their ranks.

    `own_rows` (T, k): in which row the gradient of each choice of this rank's tokens comes back.
    """

    @staticmethod
    def forward(  # noqa: PLR0913  (what autograd hands over)
        ctx: Any, own: Tensor, values: Tensor, choices: Tensor, own_rows: Tensor, by: Gathering
    ) -> Tensor:
        ctx.by, ctx.shape = by, values.shape
        ctx.save_for_backward(choices, own_rows)
        return values.flatten()[choices]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        choices, own_rows = ctx.saved_tensors
        of_copies = grad.new_zeros(ctx.shape).view(-1).index_copy_(0, choices, grad).view(ctx.shape)
        # See [Note: Gradients of experts over ranks].
        return ctx.by.send_back(of_copies).gather(0, own_rows) * ctx.by.num_ranks, None, None, None, None
