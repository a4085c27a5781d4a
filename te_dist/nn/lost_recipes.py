"""Compiled linear maps that run again without the recipe of their first pass, which is refused.

[Note: Lost recipes]
Torch's checkpoint runs a forward pass again in backward, outside of the `autocast` of the first one. In eager mode a
map remembers how it computed. A graph does not: it is chosen by guards, which take this for a pass without a recipe, or
by that of an `autocast` around backward, and cannot ask whether it is in backward. So what runs is asked: a map that is
traced without a recipe has an op in its graph, once some compiled map of the process has run by one. Before, there is
nothing to lose, and what was compiled till then is guarded by that.

Graphs tell maps apart by their place alone. What runs again must be by a recipe by which a map of its place ran and
waits for backward, or by none where none waits. An `autocast` that the repeated pass itself enters, as that of
`te_dist.checkpoint`, says what it says. Passes that record no gradients wait too, since the reentrant kind of
checkpoint begins with one, until maps of their place are trained without a recipe.
"""

from __future__ import annotations

from ast import literal_eval
from collections import Counter, defaultdict

import torch
from torch import Tensor

from te_dist._torch_private import in_backward
from te_dist.context import current_autocast, repeated_autocast
from te_dist.ops._library import LIBRARY, define_writing

_places: dict[str, str] = {}  # by the name of a plan that a recipe made, the place of its maps
_recorded: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by place, passes that wait, by plan
_unrecorded: defaultdict[str, set[str]] = defaultdict(set)  # by place, plans of passes without gradients
_is_any = False
_order = torch.zeros(())  # written by the op in name only, so that compilers leave it where it is


def know(plan: str, place: str) -> None:
    """Maps of this place, alone or with others, are computed by the plan of that name, which a recipe made."""
    _places[plan] = place


def forward(plan: str, *, records: bool) -> None:
    """A map is run by the plan of this name; `records`: gradients. Raises as `check`."""
    place = _places.get(plan)
    if place is None:
        return
    if in_backward():
        check(place, plan)
    else:
        _wait(place, plan, records=records)


def backward(plan: str) -> None:
    """A map is run backward by the plan of this name."""
    place = _places.get(plan)
    if place is not None:
        _wait_no_longer(place, plan)


def outside_of_graph(place: str, out: Tensor) -> None:
    """A map had this output between two graphs; how it ran, eager mode knows, but no graph that it may run again in."""
    recipe = current_autocast().name
    if not recipe or in_backward():
        return
    _wait(place, recipe, records=out.requires_grad)
    if out.grad_fn is not None:
        out.grad_fn.register_prehook(lambda _: _wait_no_longer(place, recipe))


def refuse_again(place: str) -> None:
    """Raises RuntimeError where the graph that is traced runs again without its recipe, see [Note: Lost recipes]."""
    if _is_any and torch.is_grad_enabled() and repeated_autocast() is None:
        torch.ops.te_dist.refuse_lost_recipe(_order, place)


def check(place: str, plan: str = "") -> None:
    """Before a map of `place` runs again, by the plan of this name or without a recipe.

    Raises:
        RuntimeError: maps of its place that ran by other recipes wait for backward, and none that ran by this one.
    """
    waiting = _recorded[place].keys() | _unrecorded[place]
    if waiting and plan not in waiting and repeated_autocast() is None:
        _recorded.clear()  # what waits for the backward pass that ends here, waits in vain
        _unrecorded.clear()
        raise RuntimeError(
            f"{literal_eval(place)[0] or 'Linear'}: a compiled linear map is run again in backward, by torch's "
            f"checkpoint, {'by another recipe' if plan else 'without a recipe'}, while it, or a map of the same name "
            "and sizes, waits for the backward pass of one in an autocast. Pass "
            "context_fn=te_dist.recompute.context_fn to torch's checkpoint or checkpoint_wrapper, or use "
            "te_dist.checkpoint: both run maps as they ran first"
        )


def _wait(place: str, plan: str, *, records: bool) -> None:
    global _is_any  # noqa: PLW0603  (what graphs are guarded by)
    _is_any = True
    if records:
        _recorded[place][plan] += 1
    else:
        _unrecorded[place].add(plan)


def _wait_no_longer(place: str, plan: str) -> None:
    waiting = _recorded[place]
    waiting[plan] -= 1
    if waiting[plan] <= 0:
        del waiting[plan]


def _refuse(_: Tensor, place: str) -> None:
    if in_backward():
        check(place)
    else:
        _unrecorded.pop(place, None)


_NAME = define_writing("refuse_lost_recipe(Tensor(a!) order, str place) -> ()")
LIBRARY.impl(_NAME, _refuse, "CPU")
torch.library.register_fake(f"te_dist::{_NAME}", lambda *_: None, lib=LIBRARY)
