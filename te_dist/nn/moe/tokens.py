"""Tokens that travel once to every rank with experts of theirs, instead of once to each of these.

Shapes: T tokens, k choices of each, P ranks, L experts of a rank; U tokens that are sent, to all ranks together, S that
arrive, of which R copies are made.

[Note: Tokens that travel once]
A token goes to each rank that has any of its experts, with its choices; there it is copied, as on a rank with all
experts. What these make of its copies is summed before it travels back, and so are the gradients of its copies. Of k
choices that are spread evenly, P (1 - (1 - 1/P)^k) ranks have one: 2 instead of 8 messages with 8 choices over 2 ranks,
3.6 over 4, 5.3 over 8. The price: such a sum is rounded once on every rank and once more where those of the ranks are
added, so that results are not, to the bit, those of other numbers of ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from te_dist.nn.moe.dispatch import AllToAllDispatcher, Arrived, refuse_graphs, rounded
from te_dist.nn.moe.exchange import Exchange, chosen_rows, send_rows
from te_dist.nn.moe.payload import Route, check_rows, send_quantized
from te_dist.nn.moe.permutation import Permutation, sort_by_expert
from te_dist.nn.moe.router import Routed
from te_dist.nn.once import once_differentiable
from te_dist.quantizers import Quantizer


class _Way(NamedTuple):
    """How tokens travel.

    Attributes:
        outgoing: sorts them by rank; positions (T, P), behind all others where a token does not go to a rank.
        by: brings them there.
        owners: int64 (T, k), the rank of each choice.
        num_copies: R; rows that are nobody's among them.
    """

    outgoing: Permutation
    by: Exchange
    owners: Tensor
    num_copies: int


class TokenDispatcher(AllToAllDispatcher):
    """See [Note: Tokens that travel once]. One copy of sizes to the host per dispatch, as without a capacity."""

    def __init__(self, num_experts: int, mesh: DeviceMesh) -> None:
        """Raises ValueError where experts do not fit the mesh, on every rank alike."""
        super().__init__(num_experts, mesh)

    @property
    def sorts(self) -> tuple[int, ...]:
        """See `Dispatcher`."""
        return self.num_ranks, self.num_local_experts

    def dispatch(self, x: Tensor, routed: Routed, *, quantizer: Quantizer | None = None) -> Arrived:
        """See `AllToAllDispatcher.dispatch`."""
        if quantizer is not None:
            check_rows(quantizer, x.dtype)
        with torch.no_grad():
            way = self._plan(routed.experts)
        # Rows first, which the device has to do with while choices are handed over.
        rows: Tensor | None = None
        if quantizer is None:
            rows = send_rows(x, way.outgoing, by=way.by, beside=routed.probabilities)
        probabilities, *found = _SendChoices.apply(routed.probabilities, routed.experts, way, self.num_local_experts)
        incoming = Permutation(*found)
        if quantizer is not None:
            route = Route(way.outgoing, incoming, way.by)
            rows = send_quantized(x, route, quantizer=quantizer, beside=routed.probabilities)
        assert rows is not None
        return Arrived(rows, incoming, probabilities, outgoing=way.outgoing, exchange=way.by)

    def _plan(self, experts: Tensor) -> _Way:
        refuse_graphs(experts)
        owners = experts // self.num_local_experts
        goes = torch.full((experts.shape[0], self.num_ranks), self.num_ranks, device=experts.device)
        index, choices, positions, counts = sort_by_expert(goes.scatter_(1, owners, owners), self.num_ranks)
        copies = torch.zeros_like(counts).scatter_add_(0, owners.flatten(), torch.ones_like(owners.flatten()))
        leaving = torch.stack((counts, copies), dim=1)
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving, group=self.group)
        *sizes, here = torch.cat((leaving[:, :1], arriving), dim=1).T.tolist()
        self.num_host_syncs += 1
        sent, received = map(tuple, sizes)
        num_sent, num_rows = sum(sent), rounded(sum(received))
        exchange = Exchange(self.group, self.num_ranks, num_sent, num_rows, sent, received)
        # NOTE: copied, since backward keeps it, and a slice would keep what it is of.
        outgoing = Permutation(index[:num_sent].clone(), choices[:num_sent], positions, counts)
        return _Way(outgoing, exchange, owners, min(rounded(sum(here)), num_rows * experts.shape[1]))


class _SendChoices(torch.autograd.Function):
    """Probabilities of copies where they are made, and how these are sorted; copies that are elsewhere lie behind."""

    @staticmethod
    def forward(
        ctx: Any, probabilities: Tensor, experts: Tensor, way: _Way, num_local_experts: int
    ) -> tuple[Tensor, ...]:
        outgoing, by, owners, num_copies = way
        (_, copies), ranks = experts.shape, outgoing.choices % by.num_ranks
        local = chosen_rows(experts, outgoing.index) - (ranks * num_local_experts)[:, None]
        # Whole numbers from 1 on, which fp32 holds, so that rows that are nobody's have no choice.
        local = torch.where((local >= 0) & (local < num_local_experts), local + 1, 0)
        arrived = by.send(torch.cat((chosen_rows(probabilities, outgoing.index), local.float()), dim=1))
        local = arrived[:, copies:].long() - 1
        index, choices, positions, counts = sort_by_expert(local, num_local_experts)
        index, choices = index[:num_copies].clone(), choices[:num_copies].clone()
        if copies > 1:  # of one choice each row that is somebody's has it
            positions = torch.where(local < 0, positions.numel(), positions)
        ctx.by, ctx.shape = by, (by.num_received, copies)
        ctx.save_for_backward(choices, outgoing.positions.gather(1, owners))
        ctx.mark_non_differentiable(index, choices, positions, counts)
        return arrived[:, :copies].flatten()[choices], index, choices, positions, counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        choices, own_rows = ctx.saved_tensors
        of_copies = grad.new_zeros(ctx.shape).view(-1).index_copy_(0, choices, grad).view(ctx.shape)
        # See [Note: Gradients of experts over ranks].
        return ctx.by.send_back(of_copies).gather(0, own_rows) * ctx.by.num_ranks, None, None, None
