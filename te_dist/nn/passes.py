"""Forward passes of linear maps: how they were computed, and which may be run again.

[Note: Which pass runs again]
Torch's checkpoint runs a forward pass again in backward, outside of the `autocast` of the first one, and says nothing
of it. It is computed as the latest pass was; evaluations, without gradients and not in training mode, that come behind
a training pass and before its backward do not count. Where training passes ran otherwise since, while it waits for
its backward, the latest may be another one, and it is refused. A pass waits as long as its function of autograd is
there and has not been run backward. One that records nothing (of frozen weights and such an input, or as the reentrant
kind of checkpoint begins) has none: it is known to wait until any map is run backward, and may wait until it has run
again, so that it is refused behind a pass that ran otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from te_dist._torch_private import in_backward
from te_dist.context import Autocast
from te_dist.nn.once import Waiting, backward_count
from te_dist.nn.plan import Plan
from te_dist.scaling.history import DelayedScalingRequest


class Pass(NamedTuple):
    """A forward pass of a map.

    Attributes:
        state: what surrounded it.
        key: what else the plan depends on.
        plan: how its products were computed; roles that have a history have no quantizer in it.
        requests: by role, what asked for a history.
        moving: with the quantizers of those as well, by whether they record amaxes and the histories move afterwards.
    """

    state: Autocast
    key: Any = None
    plan: Plan | None = None
    requests: Mapping[str, DelayedScalingRequest] = MappingProxyType({})
    moving: dict[tuple[bool, bool], Moving] = MappingProxyType({})  # type: ignore[assignment]


class Moving(NamedTuple):
    """A plan whose quantizers hold parts of these buffers, as long as they lie at these addresses."""

    scale: Tensor
    running: Tensor
    addresses: tuple[int, int]
    plan: Plan


@dataclass(slots=True)
class Latest:
    """The latest pass of a map that may be run again.

    Attributes:
        trains: whether it ran in training mode, or with gradients.
        count: of backward passes, see `backward_count`, when it ran.
        functions: of autograd, of this pass and of those before, that may wait for backward.
        own: that of this pass; None where there is none.
        pending: passes in training before this one that recorded nothing and have not run again.
        overtaken: what surrounded a pass by a recipe that this one followed and ran otherwise than, while that waited,
            or may have.
    """

    found: Pass
    trains: bool
    count: int
    functions: list[Waiting] = field(default_factory=list)
    own: Waiting | None = None
    pending: int = 0
    overtaken: Autocast | None = None

    def waits(self) -> bool:
        """Whether a pass may be run again, see [Note: Which pass runs again]."""
        if self.functions:
            self.functions = [each for each in self.functions if each.waits]
        return bool(self.functions) or (self.trains and self.count == backward_count())

    def _is_recorded(self) -> bool:
        return self.own is not None and (self.own.was_run or self.own.waits)

    def follow(self, found: Pass, *, trains: bool) -> None:
        """Goes on to the next one."""
        waits, state = self.waits(), self.found.state
        if waits and not trains:
            return
        self.pending += self.trains and not self._is_recorded()
        if not (waits or self.pending) or self.overtaken == found.state:
            self.overtaken = None
        elif found is not self.found and self.overtaken is None and state.recipe is not None and state != found.state:
            self.overtaken = state
        self.found, self.trains, self.count, self.own = found, trains, backward_count(), None

    def run_again(self) -> None:
        """Takes note that backward has run a pass again."""
        if self.pending:
            self.pending -= 1
        elif not self._is_recorded():
            self.trains = False


# Of every map, and all its passes that have plans, by age; beside the modules, since they may hold a group.
latest_of: WeakKeyDictionary[nn.Module, Latest] = WeakKeyDictionary()
planned_of: WeakKeyDictionary[nn.Module, list[Pass]] = WeakKeyDictionary()
MAX_PLANNED = 4  # of a map
WITHOUT, WITHOUT_BESIDE = Pass(Autocast()), Pass(Autocast())  # a recipe, beside compiled maps that have one
_noted: Latest | None = None  # the pass that was noted last, until its function of autograd is known


def note(module: nn.Module, found: Pass, latest: Latest | None) -> None:
    """Notes a pass of `module` that may be run again; `latest`: what is known of those before."""
    global _noted  # noqa: PLW0603
    trains = module.training or torch.is_grad_enabled()
    if latest is None:
        latest = latest_of[module] = Latest(found, trains, backward_count())
    else:
        latest.follow(found, trains=trains)
    _noted = latest


def wait_for(ctx: Any) -> None:
    """Called in the forward pass of a function of autograd: the pass that was just noted waits for its backward."""
    global _noted  # noqa: PLW0603
    latest, _noted = _noted, None
    if latest is not None and not in_backward():
        latest.own = Waiting(ctx)
        latest.functions.append(latest.own)
