"""`activations`: saved-tensor hooks that park what autograd saves in host memory."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from te_dist._torch_private import is_traceable_wrapper_subclass
from te_dist.offload.copies import COPIED, copies_of
from te_dist.offload.host import parse_bytes
from te_dist.offload.pace import Pace
from te_dist.offload.saved import ParkedView, Rebuild, buffers_of, outlives_backward, take_apart
from te_dist.offload.unit import Extent, Kept, Statistics, Unit
from te_dist.offload.writes import Writes, counter_of, version_of, writes_around

OUTSIDE = (
    "what autograd saves is parked outside of graphs: compile the model and call it inside of the block, or leave out "
    "fullgraph=True"
)


@dataclass(frozen=True)
class Policy:
    """What is parked.

    Attributes:
        budget: host bytes at most, of all contexts for the device together; None for no bound.
        min_bytes: smaller saved tensors stay.
        window: device bytes that are held for copies on their way, in either direction, at most, or one tensor of more.
    """

    budget: int | None
    min_bytes: int
    window: int


@dataclass(frozen=True)
class Parked:
    """A saved tensor in host memory: what the graph holds in its place.

    Attributes:
        writes: those into the tensor, as they were counted when it was saved.
    """

    leaves: tuple[ParkedView | Tensor, ...]
    rebuild: Rebuild
    writes: Writes


@dataclass(frozen=True)
class Stayed:
    """A saved tensor that stays where it is.

    Attributes:
        writes: those into it, as they were counted when it was saved.
        before: what was parked before it.
    """

    tensor: Tensor
    writes: Writes
    before: weakref.ref[Unit] | None


class Session:
    """The hooks of one context and what they have parked.

    Attributes:
        statistics: what was moved so far.
    """

    def __init__(self, policy: Policy, device: torch.device | None) -> None:
        self.statistics = Statistics()
        self._policy, self._device = policy, device
        self._pace = Pace(policy.budget, (policy, device))
        self._units: weakref.WeakKeyDictionary[object, list[weakref.ref[Unit]]] = weakref.WeakKeyDictionary()
        self._staying: weakref.WeakSet[object] = weakref.WeakSet()  # storages that found no room
        self._leaving: deque[weakref.ref[Unit]] = deque()
        self._latest: weakref.ref[Unit] | None = None

    def end(self) -> None:
        """To be called behind a forward pass."""
        self._pace.end()

    @torch.compiler.disable(reason=OUTSIDE)
    def pack(self, tensor: Tensor) -> Parked | Stayed:
        """What the graph shall hold for `tensor`."""
        written = writes_around(tensor)
        kept = self._why_kept(tensor, written)
        if kept is None:
            leaves, rebuild = take_apart(tensor)
            if self._takes(leaves, written):
                parked = tuple(self._park(leaf, written) for leaf in leaves)
                return Parked(parked, rebuild, Writes.so_far(tensor, counter_of(tensor)))
            kept = Kept.BUDGET
            self._staying.update(leaf.untyped_storage() for leaf in leaves)
        self.statistics.kept[kept] += 1
        # NOTE: the tensor itself would close a cycle with its own node, where that node saves its output.
        stays = tensor if tensor.grad_fn is None else tensor.detach()
        return Stayed(stays, Writes.so_far(tensor, stays), self._latest)

    @torch.compiler.disable(reason=OUTSIDE)
    def unpack(self, saved: Parked | Stayed) -> Tensor:
        """The tensor that was saved."""
        saved.writes.check()
        if isinstance(saved, Stayed):
            self._prefetch(saved.before)
            return saved.tensor
        units = [leaf.unit for leaf in saved.leaves if isinstance(leaf, ParkedView)]
        leaves = [leaf.restore() if isinstance(leaf, ParkedView) else leaf for leaf in saved.leaves]
        self._prefetch(units[0].before if units else None)
        return saved.rebuild(leaves)

    def _why_kept(self, tensor: Tensor, written: int) -> Kept | None:
        buffers = buffers_of(tensor)
        # NOTE: nested tensors are made of strided ones, whose identity they are known by.
        if tensor.layout != torch.strided or not all(b.layout == torch.strided for b in buffers):
            return Kept.FOREIGN
        if outlives_backward(tensor):
            return Kept.PARAMETER
        if not all(_is_plain(b) and self._is_meant(b.device) for b in buffers):
            return Kept.FOREIGN
        # What lies in a storage that was parked is had for nothing, and would keep it on the device.
        new = [b for b in buffers if b.numel() and self._find(b, written) is None]
        parked = len(new) < len([b for b in buffers if b.numel()])
        if not parked and sum(len(Extent.of(b)) for b in new) < max(self._policy.min_bytes, 1):
            return Kept.SMALL
        # What lies in a storage that stays would be copied, and free nothing.
        return Kept.BUDGET if any(b.untyped_storage() in self._staying for b in new) else None

    def _is_meant(self, device: torch.device) -> bool:
        return device.type in COPIED if self._device is None else device == self._device

    def _takes(self, leaves: Sequence[Tensor], written: int) -> bool:
        """Whether all of `leaves` are parked, by the budget and by [Note: Pace]."""
        extents = {
            (id(leaf.untyped_storage()), Extent.of(leaf))
            for leaf in leaves
            if leaf.numel() and not self._find(leaf, written)
        }
        nbytes = sum(len(extent) for _, extent in extents)
        if not nbytes:
            return True
        live = sum(copies_of(device).pool.live for device in {leaf.device for leaf in leaves})
        fits = self._policy.budget is None or live + nbytes <= self._policy.budget
        takes = self._pace.is_due(nbytes) and fits
        self._pace.taken += nbytes if takes else 0
        return takes

    def _park(self, leaf: Tensor, written: int) -> ParkedView | Tensor:
        if not leaf.numel():
            return leaf
        unit = self._find(leaf, written)
        if unit is None:
            source, copies = leaf.detach(), copies_of(leaf.device)
            unit = Unit(source, Extent.of(leaf), copies, written=written, statistics=self.statistics)
            unit.before, self._latest = self._latest, weakref.ref(unit)
            self._units.setdefault(leaf.untyped_storage(), []).append(weakref.ref(unit))
            if unit.is_copied_aside:
                self._leaving.append(weakref.ref(unit))
                self._let_go()
            else:
                unit.let_go()
        return ParkedView(unit, leaf)

    def _find(self, leaf: Tensor, written: int) -> Unit | None:
        """The unit in which the bytes of `leaf`, as they are now, are parked already."""
        extent = Extent.of(leaf)
        for reference in self._units.get(leaf.untyped_storage(), ()):
            unit = reference()
            if unit is not None and unit.holds(extent, (version_of(leaf), written)):
                return unit
        return None

    def _let_go(self) -> None:
        """Drops the oldest sources, until those that are left fit into the window; not the newest, if there is one.

        That may be what backward begins with.
        """
        held = [unit for r in self._leaving if (unit := r()) is not None and unit.source is not None]
        total, fewest = sum(len(unit.extent) for unit in held), min(self._policy.window, 1)
        while len(held) > fewest and total > self._policy.window:
            unit = held.pop(0)
            total -= len(unit.extent)
            unit.let_go()
        self._leaving = deque(weakref.ref(unit) for unit in held)

    def _prefetch(self, latest: weakref.ref[Unit] | None) -> None:
        """Starts copying back what backward asks for next: `latest` and what was parked before it, up to the window."""
        ahead, unit = 0, latest() if latest is not None else None
        while unit is not None and ahead < self._policy.window:
            if unit.is_copied_aside:
                unit.prefetch()
                ahead += len(unit.extent)
            unit = unit.before() if unit.before is not None else None


@torch.compiler.disable(reason=OUTSIDE)
@contextmanager
def activations(
    budget: int | str | None = None,
    *,
    min_bytes: int | str = "1MiB",
    window: int | str = "256MiB",
    device: torch.device | str | None = None,
) -> Iterator[Statistics]:
    """Parks what autograd saves inside this block in host memory until backward asks for it.

    Quantized tensors are parked as their canonical fields and rebuilt; plain tensors as they are; tensors that lie in
    one storage are copied once. Parameters and views of them, small tensors, and what exceeds the budget stay. From the
    second pass by one budget on, what is parked lies evenly among what is saved, see [Note: Pace]. Results are bit for
    bit those without it.

    Args:
        budget: host bytes at most, of all such blocks for a device together, as a number or as text ("16GiB").
            None: no bound.
        min_bytes: saved tensors of fewer bytes stay.
        window: device bytes that are held for copies on their way, in either direction, at most, or one tensor of more
            (GPU only).
        device: whose tensors are parked; those of every device by default.

    Yields:
        Statistics of the block, kept up to date through backward.
    """
    # An index names the one meant by "cuda".
    named = None if device is None else torch.empty(0, device=device).device
    session = Session(policy(budget, min_bytes, window), named)
    with torch.autograd.graph.saved_tensors_hooks(session.pack, session.unpack):
        yield session.statistics
    session.end()


def policy(budget: int | str | None, min_bytes: int | str, window: int | str) -> Policy:
    """A policy from sizes as users write them."""
    return Policy(None if budget is None else parse_bytes(budget), parse_bytes(min_bytes), parse_bytes(window))


def _is_plain(tensor: Tensor) -> bool:
    return not (is_traceable_wrapper_subclass(tensor) or tensor.is_conj() or tensor.is_neg())
