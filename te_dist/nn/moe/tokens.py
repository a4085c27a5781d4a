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

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from te_dist.nn.moe.dispatch import AllToAllDispatcher, Arrived, Numbers, nothing, refuse_graphs, rounded
from te_dist.nn.moe.exchange import Exchange, values_of_copies
from te_dist.nn.moe.payload import Route, check_rows, send
from te_dist.nn.moe.permutation import Permutation, sort_by_expert
from te_dist.nn.moe.router import Routed
from te_dist.quantizers import Quantizer
from te_dist.tensor import collectives


class TokenDispatcher(AllToAllDispatcher):
    """See [Note: Tokens that travel once]. One copy of sizes to the host per dispatch, as without a capacity."""

    def __init__(self, num_experts: int, mesh: DeviceMesh) -> None:
        """Raises ValueError where experts do not fit the mesh, on every rank alike."""
        super().__init__(num_experts, mesh)

    @property
    def sorts(self) -> tuple[int, ...]:
        """See `Dispatcher`."""
        return self.num_ranks, self.num_local_experts

    def dispatch(
        self, x: Tensor, routed: Routed, *, quantizer: Quantizer | None = None, meanwhile: Callable[[], None] = nothing
    ) -> Arrived:
        """See `AllToAllDispatcher.dispatch`."""
        if quantizer is not None:
            check_rows(quantizer, x.dtype)
        probabilities = routed.probabilities
        with torch.no_grad():
            plan = self._plan(routed.experts)
        meanwhile()
        with torch.no_grad():
            outgoing, by, num_copies = plan()

        @cache
        def decided() -> tuple[Tensor, Permutation]:
            values, (index, choices, *rest) = self._choices(routed, outgoing, by)
            # NOTE: copied, since backward keeps it, and a slice would keep what it is of.
            return values, Permutation(index[:num_copies].clone(), choices[:num_copies], *rest)

        # Rows first, which the device has to do with while choices are handed over.
        rows = send(x, Route(outgoing, lambda: decided()[1], by), quantizer=quantizer, beside=probabilities)
        with torch.no_grad():
            values, incoming = decided()
        probabilities = values_of_copies(probabilities, values, incoming, outgoing=outgoing, by=by)
        return Arrived(rows, incoming, probabilities, outgoing=outgoing, exchange=by)

    def _plan(self, experts: Tensor) -> Callable[[], tuple[Permutation, Exchange, int]]:
        """Begins, and returns what ends: how tokens are sorted by rank, positions (T, P); what brings them there; how
        many copies are made here."""
        refuse_graphs(experts)
        sizes, index, choices, *rest = self._repeated("counted", (experts,), lambda: self._counted(experts))
        numbers = Numbers(sizes)

        def end() -> tuple[Permutation, Exchange, int]:
            *sizes, here = numbers.tolist()
            self.num_host_syncs += 1
            sent, received = map(tuple, sizes)
            num_sent, num_rows = sum(sent), rounded(sum(received))
            exchange = Exchange(self.group, self.num_losses, num_sent, num_rows, sent, received)
            num_copies = min(rounded(sum(here)), num_rows * experts.shape[1])
            return Permutation(index[:num_sent].clone(), choices[:num_sent], *rest), exchange, num_copies

        return end

    def _counted(self, experts: Tensor) -> tuple[Tensor, ...]:
        """int64 (3, P), tokens that go to each rank, tokens and copies that come from each; how tokens are sorted."""
        owners = experts // self.num_local_experts
        goes = torch.full((experts.shape[0], self.num_ranks), self.num_ranks, device=experts.device)
        outgoing = sort_by_expert(goes.scatter_(1, owners, owners), self.num_ranks, first=0)
        copies = torch.zeros_like(outgoing.counts).scatter_add_(0, owners.flatten(), torch.ones_like(owners.flatten()))
        leaving = torch.stack((outgoing.counts, copies), dim=1)
        arriving = collectives.all_to_all(leaving, self.group)
        return torch.cat((leaving[:, :1], arriving), dim=1).T, *outgoing

    def _choices(self, routed: Routed, outgoing: Permutation, by: Exchange) -> tuple[Tensor, Permutation]:
        """Probabilities of what arrived, f32 (S, k); how its copies are sorted, those made elsewhere being nowhere."""
        top_k = routed.experts.shape[1]
        # Whole numbers from 1 on, which fp32 holds, so that rows that are nobody's have no choice.
        arrived = by.take(torch.cat((routed.probabilities, routed.experts + 1), dim=1), outgoing.index)
        first = 1 + self.mesh.get_local_rank() * self.num_local_experts
        incoming = sort_by_expert(arrived[:, top_k:].long(), self.num_local_experts, first=first)
        return arrived[:, :top_k].contiguous(), incoming
