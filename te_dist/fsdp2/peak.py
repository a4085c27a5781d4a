"""How many bytes of parameters are allocated at once while a sharded model runs, predicted from its footprints.

[Note: Order of allocations]
FSDP2 packs what a rank sends and allocates one buffer that all shards of a unit arrive in, copies them from there into
a buffer of each wire, and lets te_dist fill what is no view of these. In forward that one buffer lives until the next
unit is gathered, so that copies overlap with collectives; before torch 2.15 until that one is copied as well. In
backward it is freed at once, but the unit that ran before is gathered while this one runs. Over one rank parameters are
copied one after the other, and nothing arrives.

Units are taken to run in the order of their modules. Counted are parameters alone: shards, and all that gathers
allocate. Activations, gradients and the optimizer's state are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from te_dist.fsdp2.footprint import Buffers, Footprint, Unit
from te_dist.fsdp2.plan import Phase

_FREES_BEFORE_COPYING = torch.__version__ >= "2.15"


@dataclass(frozen=True)
class Peak:
    """Most bytes of parameters at any time, shards included.

    Attributes:
        forward, backward: in each pass.
        between: what is there after forward.
        idle: what is there between steps: shards.
    """

    forward: int
    backward: int
    between: int
    idle: int

    @property
    def bytes(self) -> int:
        """In a step."""
        return max(self.forward, self.backward)


def peak_bytes(model: Unit) -> Peak:
    """What `model` allocates for parameters on one rank. See [Note: Order of allocations].

    Args:
        model: from `footprints`.

    Raises:
        ValueError: shards lie in host memory.
    """
    if any(unit.is_offloaded for unit in model.flat()):
        raise ValueError("shards of this model lie in host memory, whose copies are not planned; leave the policy out")
    run = _Run(model)
    idle = run.now
    run.forward(model)
    forward, between = run.most, run.now
    run.most = run.now
    run.backward(model)
    return Peak(forward, run.most, between, idle)


class _Gather:
    """Parameters that are gathered together.

    Attributes:
        arriving: sizes of the buffer that shards arrive in, from sending to copying; None otherwise.
        held: bytes that it has allocated, while its parameters are there; None otherwise.
    """

    def __init__(self, unit: Unit, parameters: list[Footprint]) -> None:
        self.unit, self.parameters = unit, parameters
        self.num_shards = parameters[0].num_shards
        self.arriving: list[int] | None = None
        self.held: int | None = None

    def buffers(self, phase: Phase) -> list[Buffers]:
        """Of each parameter."""
        return [each.buffers[phase] for each in self.parameters]


class _Run:
    """A step, as far as parameters go.

    Attributes:
        now, most: bytes allocated, and the most since this was set.
    """

    def __init__(self, model: Unit) -> None:
        self._gathers: dict[str, list[_Gather]] = {}
        self._order: list[_Gather] = []  # in which they end in forward
        self._deferred: list[int] = []  # the buffer that shards arrived in, of the last gather of a forward pass
        self.now = self.most = 0
        for unit in model.flat():
            gathered = [each for each in unit.parameters if each.buffers]
            numbers = dict.fromkeys(each.group for each in gathered)
            groups = [[each for each in gathered if each.group == number] for number in numbers]
            self._gathers[unit.name] = [_Gather(unit, group) for group in groups]
            self._take(size for each in unit.parameters for size in each.stored)

    def forward(self, unit: Unit) -> None:
        """Runs a unit, and those inside."""
        own = self._gathers[unit.name]
        if unit.is_root:
            self._order = []
        for gather in own:
            self._send(gather, Phase.FORWARD)
            self._receive(gather, Phase.FORWARD)
        self._send_ahead(unit, Phase.FORWARD)
        for inner in unit.inner:
            self.forward(inner)
        for gather in own:
            if not unit.is_kept:
                self._drop(gather)
            self._order.append(gather)
        if unit.is_root:
            self._end_deferral()

    def backward(self, unit: Unit) -> None:
        """Runs a unit back, and those inside."""
        own = self._gathers[unit.name]
        for index, gather in enumerate(own):
            self._send(gather, Phase.BACKWARD)
            self._receive(gather, Phase.BACKWARD)
            if not unit.ahead[1] and (len(own) == 1 or index == 1):  # of several in a unit, the second does so for all
                self._send_previous(gather)
        self._send_ahead(unit, Phase.BACKWARD)
        for inner in reversed(unit.inner):
            self.backward(inner)
        for gather in own:
            self._drop(gather)

    def _send(self, gather: _Gather, phase: Phase) -> None:
        """Starts a gather, unless that is done or not wanted."""
        left = phase is Phase.BACKWARD and gather.unit.is_left_in_backward
        if gather.arriving is not None or gather.held is not None or left:
            return
        gather.arriving = []
        if gather.num_shards > 1:
            buffers = gather.buffers(phase)
            packed = [*(size for each in buffers for size in each.packed), sum(each.cast for each in buffers)]
            gather.arriving = [sum(size for each in buffers for size in each.gathered)]
            self._take(packed)
            self._take(gather.arriving)
            self._free(packed)

    def _send_ahead(self, unit: Unit, phase: Phase) -> None:
        """Starts the gathers that the unit was told to start."""
        for name in unit.ahead[list(Phase).index(phase)]:
            for gather in self._gathers[name]:
                self._send(gather, phase)

    def _send_previous(self, gather: _Gather) -> None:
        """In backward, starts the gathers of the unit that ended before."""
        if gather not in self._order:
            return  # of another root
        before = [each for each in self._order[: self._order.index(gather)] if each.unit is not gather.unit]
        for each in reversed(before):
            if each.unit is before[-1].unit:
                self._send(each, Phase.BACKWARD)

    def _receive(self, gather: _Gather, phase: Phase) -> None:
        """Ends a gather that was started."""
        if gather.arriving is None:
            return
        if phase is Phase.FORWARD and _FREES_BEFORE_COPYING:
            self._end_deferral()
        buffers = gather.buffers(phase)
        copied = self._copy_alone(buffers) if gather.num_shards == 1 else self._copy_out(buffers)
        gather.held = sum(size for each in buffers for size in each.gathered)
        for each in buffers:
            self._take(each.owned)
            self._take([each.scratch])
            self._free([each.scratch, *each.unused])
            gather.held += sum(each.owned) - sum(each.unused)
        self._free(copied)
        if phase is Phase.FORWARD:
            self._end_deferral()
            self._deferred = gather.arriving
        else:
            self._free(gather.arriving)
        gather.arriving = None

    def _copy_out(self, buffers: list[Buffers]) -> list[int]:
        """Allocates what arrived is copied into."""
        staged = [size for each in buffers for size in each.staged]
        self._take(size for each in buffers for size in each.gathered)
        self._take(staged)
        self._free(staged)
        return []

    def _copy_alone(self, buffers: list[Buffers]) -> list[int]:
        """The same over one rank. Returns what is left of the last parameter's wires."""
        left: list[int] = []
        for each in buffers:
            packed = [*each.packed, each.cast]
            self._take(packed)
            self._free(left)
            left = packed[:1]
            self._free(packed[1:])
            self._take(each.gathered)
        return left

    def _drop(self, gather: _Gather) -> None:
        """Frees parameters that are there."""
        self._free([gather.held or 0])
        gather.held = None

    def _end_deferral(self) -> None:
        self._free(self._deferred)
        self._deferred = []

    def _take(self, sizes: Iterable[int]) -> None:
        self.now += sum(sizes)
        self.most = max(self.most, self.now)

    def _free(self, sizes: Iterable[int]) -> None:
        self.now -= sum(sizes)
