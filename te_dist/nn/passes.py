"""Forward passes of linear maps: how they were computed, and which may be run again.

[Note: Which pass runs again]
Torch's checkpoint runs a forward pass again in backward, outside of the `autocast` of the first one, and says nothing
of it. It is computed as the latest pass was; evaluations, without gradients and not in training mode, that come behind
a training pass and before backward do not count. Where training passes ran otherwise since, with no backward pass in
between, the latest may be another one, and it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from te_dist.context import Autocast
from te_dist.nn.once import backward_count
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
        overtaken: what surrounded a pass by a recipe that this one followed and ran otherwise than, with no backward
            pass in between.
    """

    found: Pass
    trains: bool
    count: int
    overtaken: Autocast | None = None

    def follow(self, found: Pass, *, trains: bool) -> None:
        """Goes on to the next one."""
        count, state = backward_count(), self.found.state
        waits = self.trains and self.count == count
        if waits and not trains:
            return
        if not waits or self.overtaken == found.state:
            self.overtaken = None
        elif found is not self.found and self.overtaken is None and state.recipe is not None and state != found.state:
            self.overtaken = state
        self.found, self.trains, self.count = found, trains, count


# Of every map, and all its passes that have plans, by age; beside the modules, since they may hold a group.
latest_of: WeakKeyDictionary[nn.Module, Latest] = WeakKeyDictionary()
planned_of: WeakKeyDictionary[nn.Module, list[Pass]] = WeakKeyDictionary()
MAX_PLANNED = 4  # of a map
WITHOUT, WITHOUT_BESIDE = Pass(Autocast()), Pass(Autocast())  # a recipe, beside compiled maps that have one


def note(module: nn.Module, found: Pass, latest: Latest | None) -> None:
    """Notes a pass of `module` that may be run again; `latest`: what is known of those before."""
    trains = module.training or torch.is_grad_enabled()
    if latest is None:
        latest_of[module] = Latest(found, trains, backward_count())
    else:
        latest.follow(found, trains=trains)
