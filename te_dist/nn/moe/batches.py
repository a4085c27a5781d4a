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

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from te_dist.nn.moe.dispatch import AllToAllDispatcher, Arrived, Numbers, is_captured, nothing, refuse_graphs, rounded
from te_dist.nn.moe.exchange import values_of_copies
from te_dist.nn.moe.payload import Route, check_rows, send
from te_dist.nn.moe.permutation import Permutation, sort_by_expert
from te_dist.nn.moe.router import Routed
from te_dist.quantizers import Quantizer
from te_dist.tensor import collectives


@dataclass(frozen=True)
class Gathering:
    """Rows of all ranks, one rank after the other, and the way back. See `Carrier`.

    Attributes:
        group: the P ranks.
        num_losses: see there.
    """

    group: dist.ProcessGroup
    num_losses: float

    @property
    def is_regular(self) -> bool:
        """See `Carrier`."""
        return True

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        """(P T, ...) of (T, ...), all of them, whatever `index` is. Collective."""
        return collectives.all_gather(x.contiguous(), self.group)

    def send_back(self, rows: Tensor) -> Tensor:
        """(P T, ...) of (P T, ...): what each rank has for the tokens of this one. Collective."""
        return collectives.all_to_all(rows, self.group)


class BatchDispatcher(AllToAllDispatcher):
    """See [Note: Batches that travel]. All ranks have equally many tokens.

    Attributes:
        capacity: C, of which a rank has P for copies, whoever sends their tokens; or None for no limit.
    """

    def __init__(self, num_experts: int, mesh: DeviceMesh, *, capacity: int | None = None) -> None:
        """Raises ValueError where experts or capacity do not fit the mesh, on every rank alike."""
        super().__init__(num_experts, mesh, capacity=capacity)
        self._known_tokens: set[int] = set()  # numbers of them that were the same on all ranks

    @property
    def sorts(self) -> tuple[int, ...]:
        """See `Dispatcher`."""
        return (self.num_local_experts,)

    def dispatch(
        self, x: Tensor, routed: Routed, *, quantizer: Quantizer | None = None, meanwhile: Callable[[], None] = nothing
    ) -> Arrived:
        """See `AllToAllDispatcher.dispatch`; `dropped` are copies for experts of this rank, of whichever tokens.

        Raises:
            RuntimeError: a CUDA graph is being captured, and there is no capacity.
            ValueError: as there; or a number of tokens that all ranks meet for the first time differs among them.
        """
        if quantizer is not None:
            check_rows(quantizer, x.dtype)
        if self.capacity is None:
            refuse_graphs(routed.experts)
        self._check_tokens(routed.experts)
        by, probabilities = Gathering(self.group, self.num_losses), routed.probabilities
        with torch.no_grad():
            given = probabilities, routed.experts
            values, places, index, *found = self._repeated("decided", given, lambda: self._decided(*given))
            counts = Numbers(found[2]) if self.capacity is None else None
        meanwhile()

        @cache
        def incoming() -> Permutation:
            num_copies = self._num_copies(counts, len(index))
            # NOTE: copied, since backward keeps it, and a slice would keep what it is of.
            return Permutation(index[:num_copies].clone(), found[0][:num_copies], *found[1:3])

        outgoing = Permutation(places[:, 0], places[:, 0], places, found[2])
        rows = send(x, Route(outgoing, incoming, by), quantizer=quantizer, beside=probabilities)
        probabilities = values_of_copies(probabilities, values, incoming(), outgoing=outgoing, by=by)
        dropped = None if self.capacity is None else found[3]
        return Arrived(rows, incoming(), probabilities, outgoing=outgoing, exchange=by, dropped=dropped)

    def _check_tokens(self, experts: Tensor) -> None:
        """Raises ValueError, on every rank alike, where a number of tokens that is new here is not all ranks'."""
        tokens = len(experts)
        if tokens in self._known_tokens or is_captured(experts):
            return
        counts = collectives.all_gather(torch.tensor([tokens], device=experts.device), self.group).tolist()
        self.num_host_syncs += 1
        if len(set(counts)) > 1:
            raise ValueError(
                f'travels="batches": got {tokens} tokens on this rank and {counts} on all, wanted equally many: what '
                'travels is as large on every rank; pad them, or choose travels="tokens"'
            )
        self._known_tokens.add(tokens)

    def _decided(self, probabilities: Tensor, experts: Tensor) -> tuple[Tensor, ...]:
        """Of all ranks: probabilities (P T, k); where what comes back is, (T, P); `incoming`; how many are dropped."""
        tokens, top_k = experts.shape
        # Numbers of experts are whole, and fp32 holds them.
        both = collectives.all_gather(torch.cat((probabilities, experts), dim=1), self.group)
        places = torch.arange(len(both), device=experts.device).view(self.num_ranks, tokens).t().contiguous()
        chosen, first, dropped = both[:, top_k:].long(), self.mesh.get_local_rank() * self.num_local_experts, ()
        if self.capacity is not None:
            here = (chosen >= first) & (chosen < first + self.num_local_experts)
            before = here.t().flatten().cumsum(0)  # all first choices before all second ones
            kept = here & (before.view(top_k, len(both)).t() <= self.capacity * self.num_ranks)
            chosen, dropped = torch.where(kept, chosen, -1), (here.sum() - kept.sum(),)
        incoming = sort_by_expert(chosen, self.num_local_experts, first=first)
        return both[:, :top_k].contiguous(), places, *incoming, *dropped

    def _num_copies(self, counts: Numbers | None, most: int) -> int:
        """R, at most `most`; rows that are nobody's among them."""
        if counts is None:
            assert self.capacity is not None
            return min(self.capacity * self.num_ranks, most)
        self.num_host_syncs += 1
        return min(rounded(sum(counts.tolist())), most)
