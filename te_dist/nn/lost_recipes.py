"""Compiled linear maps that run again without the recipe of their first pass, which is refused.

[Note: Lost recipes]
Torch's checkpoint runs a forward pass again in backward, outside of the `autocast` of the first one. In eager mode a
map remembers how it computed. A graph does not: it is chosen by guards, which take this for a pass without a recipe, or
by that of an `autocast` around backward, and cannot ask whether it is in backward. So what runs is asked: a map that is
traced without a recipe has an op in its graph, once some compiled map of the process has run by one. Before, there is
nothing to lose, and what was compiled till then is guarded by that.

Graphs tell maps apart by their place alone (`LinearSite.graph_place`, which converted maps of the same sizes share).
What runs again must be by a recipe by which a map of its place ran and waits for backward, or by none where none
waits. An `autocast` that the repeated pass itself enters, as that of `te_dist.checkpoint`, says what it says. Passes
of training that record no gradients wait too, since the reentrant kind of checkpoint begins with one, until they have
run again.
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
_unrecorded: defaultdict[str, Counter[str]] = defaultdict(Counter)  # the same of passes that record no gradients
_plain: set[str] = set()  # places where one was by none, since the latest that was not has been run backward
_ended: set[str] = set()  # places where this has happened, until the next pass
_is_any = False
_order = torch.zeros(())  # written by the op in name only, so that compilers leave it where it is


def know(plan: str, place: str) -> None:
    """Maps of this place, alone or with others, are trained by the plan of that name, which a recipe made."""
    _places[plan] = place


def forward(plan: str, *, records: bool) -> None:
    """A map is run by the plan of this name; `records`: gradients. Raises as `check`."""
    place = _places.get(plan)
    if place is None:
        return
    if in_backward():
        check(place, plan)
        _wait_no_longer(_unrecorded, place, plan)
    else:
        _wait(place, plan, records=records)


def backward(plan: str) -> None:
    """A map is run backward by the plan of this name."""
    place = _places.get(plan)
    if place is not None:
        _wait_no_longer(_recorded, place, plan)


def outside_of_graph(place: str, output: Tensor | tuple[Tensor, Tensor | None], *, trains: bool) -> None:
    """A map had this output between two graphs; how it ran, eager mode knows, but no graph that it may run again in.

    `trains`: whether it is in training mode.
    """
    recipe = current_autocast().name
    rows, values = output if isinstance(output, tuple) else (output, None)
    out = rows if values is None else values
    if in_backward() or not (recipe and (trains or out.requires_grad)):
        return
    _wait(place, recipe, records=out.requires_grad)
    if out.grad_fn is not None:
        out.grad_fn.register_prehook(lambda _: _wait_no_longer(_recorded, place, recipe))


def refuse_again(place: str) -> None:
    """Raises RuntimeError where the graph that is traced runs again without its recipe, see [Note: Lost recipes]."""
    if _is_any and repeated_autocast() is None:
        torch.ops.te_dist.refuse_lost_recipe(_order, place)


def waits(place: str) -> bool:
    """Whether a map of this place, alone or with others, ran by a recipe and waits for backward."""
    return _is_any and bool(_recorded[place] or _unrecorded[place])


def check(place: str, plan: str = "") -> None:
    """Before a map of `place` runs again, by the plan of this name or without a recipe.

    Raises:
        RuntimeError: maps of its place that ran by other recipes wait for backward, and none that ran by this one; or
            one that ran there had none.
    """
    waiting = _recorded[place].keys() | _unrecorded[place].keys()
    is_lost = place in _plain if plan else bool(waiting)
    if (is_lost or (waiting and plan not in waiting)) and repeated_autocast() is None:
        for records in (_recorded, _unrecorded, _plain, _ended):  # the backward pass that others wait for ends here
            records.clear()
        raise lost(place, "by another recipe" if plan else "without a recipe")


def lost(place: str, how: str) -> RuntimeError:
    """The error of a map of `place` that would be run again `how`."""
    name, in_features, out_features, *_ = literal_eval(place)
    return RuntimeError(
        f"{name or 'Linear'} ({in_features} to {out_features}): a linear map is run again in backward, by torch's "
        f"checkpoint, {how}: it, or a compiled map of the same name and sizes, may have run otherwise at first, in "
        "this step or in one that was never run backward. Pass context_fn=te_dist.recompute.context_fn to torch's "
        "checkpoint or checkpoint_wrapper, or use te_dist.checkpoint: both run maps as they ran first. Maps that run "
        "differently may be told apart by name="
    )


def _wait(place: str, plan: str, *, records: bool) -> None:
    global _is_any  # noqa: PLW0603  (what graphs are guarded by)
    _is_any = True
    _begin(place)
    (_recorded if records else _unrecorded)[place][plan] += 1


def _wait_no_longer(records: dict[str, Counter[str]], place: str, plan: str) -> None:
    waiting = records[place]
    waiting[plan] -= 1
    if waiting[plan] <= 0:
        del waiting[plan]
    if not waits(place):
        _ended.add(place)


def _begin(place: str) -> None:
    """A map of this place is run for the first time."""
    if place in _ended:
        _ended.discard(place)
        _plain.discard(place)


def _refuse(_: Tensor, place: str) -> None:
    if in_backward():
        check(place)
    else:
        _begin(place)
        _plain.add(place)


_NAME = define_writing("refuse_lost_recipe(Tensor(a!) order, str place) -> ()")
LIBRARY.impl(_NAME, _refuse, "CPU")
torch.library.register_fake(f"te_dist::{_NAME}", lambda *_: None, lib=LIBRARY)
