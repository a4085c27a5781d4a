"""How rows come to their experts: on this rank, or over a mesh of ranks of which each has some of them.

Shapes: T tokens, k choices of each, E experts, P ranks, L = E / P experts of a rank, C slots.

[Note: Expert parallelism]
Rank p has the experts from p * L on. Copies of tokens travel sorted by expert; those that arrive come by rank and then
by expert, and are sorted by expert with the ranks in order, which is the order they would have on one rank with all
tokens. That second sorting is an index: who multiplies the rows gathers them by it.

Without a capacity no copy is lost. The sizes of messages are device data that the collective wants on the host: one
copy to the host per dispatch, counted. What arrives is followed by rows that are nobody's, at most one for sixteen, so
that steps have few numbers of rows, and what was found out for one of them serves others. With a capacity of C, every
rank sends C slots to every other, full or not: nothing waits for the device, and a CUDA graph can hold it. Copies
beyond C are dropped, last choices first and among them last tokens first; what a dropped copy would have added to its
token is zero, and their number is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from te_dist.kernels.tape import Tapes
from te_dist.nn.moe.exchange import Carrier, Exchange, bring_back, send_values
from te_dist.nn.moe.payload import Route, check_rows, send
from te_dist.nn.moe.permutation import Permutation, permute_probabilities, sort_by_expert
from te_dist.nn.moe.router import Routed
from te_dist.quantizers import Quantizer
from te_dist.tensor import collectives

_tapes = Tapes(max_tapes=1024)


def nothing() -> None:
    """Has nothing to do meanwhile."""


class Arrived:
    """Rows at the experts of this rank. No tuple or dataclass, in which FSDP2 would cast what it finds.

    Attributes:
        rows: (S, H), in the order in which they arrived, of which experts multiply `rows[by_expert.index]`; or a
            QuantizedTensor (R, H), which is sorted already.
        by_expert: sorts them by expert; counts of this rank's experts, (L,).
        probabilities: f32 (R,), of the sorted rows.
        outgoing: how this rank sorted its own tokens; None where they stayed.
        exchange: how they came; None where they stayed.
        dropped: int64 scalar, copies of this rank's tokens that were not sent, or, of batches, that found no room here;
            None without a capacity.
    """

    def __init__(
        self,
        rows: Tensor,
        by_expert: Permutation,
        probabilities: Tensor,
        *,
        outgoing: Permutation | None = None,
        exchange: Carrier | None = None,
        dropped: Tensor | None = None,
    ) -> None:
        self.rows = rows
        self.by_expert = by_expert
        self.probabilities = probabilities
        self.outgoing = outgoing
        self.exchange = exchange
        self.dropped = dropped


class Numbers:
    """Some numbers on their way to the host, while the device goes on with what it is given next."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)
        self._there = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def tolist(self) -> list[Any]:
        """The numbers, once they are there."""
        if self._there is not None:
            self._there.synchronize()
        return self._copy.tolist()


class Dispatcher(Protocol):
    """Brings rows to experts and back.

    Attributes:
        num_local_experts: of this rank.
        is_collective: whether ranks do it together, backward too.
    """

    num_local_experts: int
    is_collective: bool

    @property
    def sorts(self) -> tuple[int, ...]:
        """Among how many each of the sorts of a dispatch sorts."""
        ...

    def dispatch(
        self, x: Tensor, routed: Routed, *, quantizer: Quantizer | None = None, meanwhile: Callable[[], None] = nothing
    ) -> Arrived:
        """Rows (T, H) at their experts; quantized on the way where there is a quantizer.

        `meanwhile` is called once: before the host waits, where it does, so that the device has something to do.
        """
        ...

    def combine(self, y: Tensor, arrived: Arrived) -> Tensor:
        """(T, H): sums of what experts made of every token's copies, of those of experts here, `y` (S, H)."""
        ...


class LocalDispatcher:
    """All experts are on this rank: nothing is moved but by who multiplies."""

    is_collective = False

    def __init__(self, num_experts: int) -> None:
        self.num_local_experts = num_experts

    @property
    def sorts(self) -> tuple[int, ...]:
        """See `Dispatcher`."""
        return (self.num_local_experts,)

    def dispatch(
        self, x: Tensor, routed: Routed, *, quantizer: Quantizer | None = None, meanwhile: Callable[[], None] = nothing
    ) -> Arrived:
        """See `Dispatcher`; nothing is sent, and nothing quantized."""
        meanwhile()
        by_expert = sort_by_expert(routed.experts, self.num_local_experts)
        return Arrived(x, by_expert, permute_probabilities(routed.probabilities, by_expert))

    def combine(self, y: Tensor, arrived: Arrived) -> Tensor:
        """See `Dispatcher`; there are no others."""
        return y


class AllToAllDispatcher:
    """Each rank of a mesh has some experts. See [Note: Expert parallelism]. Methods are collective.

    Attributes:
        capacity: C, or None for no limit.
        num_losses: by which gradients are divided, see `Carrier`: as many as there are ranks, unless some have parts of
            the same sequences, or another factor was asked for.
        num_parts: how many ranks have parts of the same sequences.
        num_host_syncs: how often a dispatch waited for the device.
    """

    is_collective = True

    def __init__(self, num_experts: int, mesh: DeviceMesh, *, capacity: int | None = None) -> None:
        """Raises ValueError where experts or capacity do not fit the mesh, on every rank alike."""
        if mesh.ndim != 1:
            raise ValueError(f"mesh: got {mesh.ndim} dimensions, wanted the one of the experts; pass mesh[name]")
        if dist.get_process_group_ranks(mesh.get_group()) != mesh.mesh.tolist():
            raise ValueError(
                f"mesh: got ranks {mesh.mesh.tolist()}, wanted them in rising order, as their group has them"
            )
        if num_experts % mesh.size():
            raise ValueError(
                f"num_experts: got {num_experts} over {mesh.size()} ranks, wanted a multiple of them; change either"
            )
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity: got {capacity}, wanted at least one slot, or None for no limit")
        self.num_local_experts = num_experts // mesh.size()
        self.num_ranks = mesh.size()
        self.num_parts = 1
        self.num_losses: float = mesh.size()
        self.mesh = mesh  # and no group, which cannot be copied
        self.capacity = capacity
        self.num_host_syncs = 0

    @property
    def sorts(self) -> tuple[int, ...]:
        """See `Dispatcher`."""
        return self.num_local_experts * self.num_ranks, self.num_local_experts

    def divide_by(self, factor: float | None) -> None:
        """Has gradients divided by `factor`; None for the mean over losses. See [Note: Divided gradients]."""
        self.num_losses = self.num_ranks // self.num_parts if factor is None else factor

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks of the mesh."""
        return self.mesh.get_group()

    def dispatch(
        self, x: Tensor, routed: Routed, *, quantizer: Quantizer | None = None, meanwhile: Callable[[], None] = nothing
    ) -> Arrived:
        """See `Dispatcher` and [Note: Quantized payload].

        Raises:
            RuntimeError: a CUDA graph is being captured, and there is no capacity.
            ValueError: rows of this quantizer cannot be moved one by one; on every rank alike, before any collective.
        """
        if quantizer is not None:
            check_rows(quantizer, x.dtype)
        with torch.no_grad():
            plan = (self._plan_any_sizes if self.capacity is None else self._plan_slots)(routed.experts)
        meanwhile()
        with torch.no_grad():
            outgoing, incoming, exchange = plan()
            dropped = None if self.capacity is None else routed.experts.numel() - outgoing.counts.sum()
        route = Route(outgoing, lambda: incoming, exchange)
        rows = send(x, route, quantizer=quantizer, beside=routed.probabilities)
        probabilities = send_values(routed.probabilities, outgoing, by=exchange)
        probabilities = permute_probabilities(probabilities[:, None], incoming)
        return Arrived(rows, incoming, probabilities, outgoing=outgoing, exchange=exchange, dropped=dropped)

    def combine(self, y: Tensor, arrived: Arrived) -> Tensor:
        """See `Dispatcher`."""
        assert arrived.outgoing is not None and arrived.exchange is not None
        return bring_back(y, arrived.outgoing, by=arrived.exchange)

    def _plan_any_sizes(self, experts: Tensor) -> Callable[[], tuple[Permutation, Permutation, Exchange]]:
        """Begins, and returns what ends: how rows leave, how they are sorted where they arrive, what brings them."""
        refuse_graphs(experts)
        counts, sizes, *outgoing = self._repeated("leaving", (experts,), lambda: self._leaving(experts))
        numbers = Numbers(sizes)

        def end() -> tuple[Permutation, Permutation, Exchange]:
            sent, received = map(tuple, numbers.tolist())
            self.num_host_syncs += 1
            num_rows = rounded(sum(received))
            incoming = self._repeated(("arriving", num_rows), (counts,), lambda: _with_spare_rows(counts, num_rows))
            exchange = Exchange(self.group, self.num_losses, sum(sent), num_rows, sent, received)
            return Permutation(*outgoing), Permutation(*incoming), exchange

        return end

    def _leaving(self, experts: Tensor) -> tuple[Tensor, ...]:
        """int64 (P, L), rows from each rank for each expert here; (2, P), those that go and come; `outgoing`."""
        outgoing = sort_by_expert(experts, self.num_local_experts * self.num_ranks)
        counts = self._swap_counts(outgoing.counts)
        return counts, torch.stack((outgoing.counts.view(counts.shape).sum(1), counts.sum(1))), *outgoing

    def _plan_slots(self, experts: Tensor) -> Callable[[], tuple[Permutation, Permutation, Exchange]]:
        """See `_plan_any_sizes`; there is nothing to end."""
        assert self.capacity is not None
        num_slots = self.capacity * self.num_ranks
        found = self._repeated("slots", (experts,), lambda: self._into_slots(experts, num_slots))
        exchange = Exchange(self.group, self.num_losses, num_slots, num_slots, has_spare_row=True)
        return lambda: (Permutation(*found[:4]), Permutation(*found[4:]), exchange)

    def _into_slots(self, experts: Tensor, num_slots: int) -> tuple[Tensor, ...]:
        """`outgoing` and `incoming`."""
        assert self.capacity is not None
        outgoing = fill_slots(experts, self.num_ranks, self.num_local_experts, capacity=self.capacity)
        counts = self._swap_counts(outgoing.counts)
        return *outgoing, *_behind(counts, self.capacity - counts.sum(1, keepdim=True), num_slots)

    def _repeated(
        self, name: Hashable, tensors: tuple[Tensor, ...], function: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """What `function` returns, which depends on `tensors`, on its name and on attributes; recorded and played."""
        key = type(self), name, self.group, self.num_local_experts, self.capacity
        return _tapes.run(key, tensors, lambda: (function(), None))[0]

    def _swap_counts(self, counts: Tensor) -> Tensor:
        """int64 (P, L): rows that come from each rank for each expert here, of rows that go to each expert, (E,)."""
        return collectives.all_to_all(counts, self.group).view(self.num_ranks, self.num_local_experts)


def is_captured(tensor: Tensor) -> bool:
    """Whether what is done to a tensor now goes into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def refuse_graphs(experts: Tensor) -> None:
    """Raises RuntimeError where a CUDA graph is being captured."""
    if is_captured(experts):
        raise RuntimeError(
            "expert parallelism without a capacity copies sizes to the host, which a CUDA graph cannot hold; choose a "
            "capacity"
        )


def rounded(num_rows: int) -> int:
    """Not less, of 2**4 numbers between a power of two and the next."""
    grain = 1 << max(0, num_rows.bit_length() - 1 - 4)
    return -(-num_rows // grain) * grain


def _with_spare_rows(counts: Tensor, num_rows: int) -> Permutation:
    """`by_expert` of rows behind which some are nobody's, `num_rows` in all."""
    spare = torch.zeros(counts.shape[0], 1, dtype=counts.dtype, device=counts.device)
    spare[-1].add_(num_rows - counts.sum())
    return _behind(counts, spare, num_rows)


def _behind(counts: Tensor, spare: Tensor, num_rows: int) -> Permutation:
    """`by_expert` of rows of which some from each rank, `spare` (P, 1), are nobody's and sort behind the others."""
    index, choices, positions, counts = by_expert(torch.cat((counts, spare), dim=1), num_rows)
    return Permutation(index, choices, positions, counts[:-1])


def by_expert(counts: Tensor, num_rows: int) -> Permutation:
    """Sorts rows that come by rank and then by expert.

    Args:
        counts: int64 (P, L), rows from each rank for each expert; `num_rows` in all.
    """
    ends = counts.flatten().cumsum(0)
    begins = (ends - counts.flatten()).view_as(counts)
    sorted_begins = (counts.T.flatten().cumsum(0) - counts.T.flatten()).view_as(counts.T).T
    rows = torch.arange(num_rows, device=counts.device)
    positions = rows + (sorted_begins - begins).flatten()[torch.searchsorted(ends, rows, right=True)]
    index = torch.empty_like(positions)
    index[positions] = rows
    return Permutation(index, index, positions[:, None], counts.sum(0))


def fill_slots(experts: Tensor, num_ranks: int, num_local_experts: int, *, capacity: int) -> Permutation:
    """Sorts copies into `capacity` slots for each rank, by expert. Counts are those of copies that have a slot.

    Copies without one have the position behind the last slot. Empty slots have index 0: whatever they hold, it lies
    behind the rows of all experts where it arrives, and nobody reads it.

    Args:
        experts: int64 (T, k), choices of falling score.
    """
    (tokens, copies), device = experts.shape, experts.device
    owners = experts // num_local_experts
    first = sort_by_expert(owners.T.contiguous(), num_ranks)  # all first choices before all second ones
    begins = first.counts.cumsum(0) - first.counts
    has_slot = (first.positions.T - begins[owners]) < capacity
    num_experts, num_slots = num_ranks * num_local_experts, num_ranks * capacity
    kept = sort_by_expert(torch.where(has_slot, experts, num_experts), num_experts)
    begins = (kept.counts.cumsum(0) - kept.counts)[::num_local_experts]
    shift = torch.arange(0, num_slots, capacity, device=device) - begins
    positions = torch.where(has_slot, kept.positions + shift[owners], num_slots).contiguous()
    choices = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
    choices[positions.flatten()] = torch.arange(tokens * copies, device=device)
    return Permutation(choices[:-1] // copies, choices[:-1], positions, kept.counts)
