"""Compiled linear maps that run again without the recipe of their first pass, which is refused.

[Note: Lost recipes]
Torch's checkpoint runs a forward pass again in backward, outside of the `autocast` of the first one. In eager mode a
map remembers how it computed. A graph does not: it is chosen by guards, which take this for a pass without a recipe and
cannot ask whether it is in backward. So what runs is asked: a map that is traced without a recipe has an op in its
graph, once some compiled map of the process has run by one. Before, there is nothing to lose, and what was compiled
till then is guarded by that. Graphs tell maps apart by their place alone: where one of it has run by a recipe since the
latest backward pass, none may run again without.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist._torch_private import in_backward
from te_dist.context import current_autocast
from te_dist.ops._library import LIBRARY, define_writing

_places: dict[str, str] = {}  # by the name of a plan that a recipe made, the place of its maps
_by_recipe: set[str] = set()  # places that ran by one
_has_been_backward = False  # since then
_is_any = False
_order = torch.zeros(())  # written by the op in name only, so that compilers leave it where it is


def know(plan: str, place: str) -> None:
    """Maps of this place, alone or with others, are computed by the plan of that name, which a recipe made."""
    _places[plan] = place


def remember(plan: str) -> None:
    """A map was run forward by the plan of this name."""
    place = _places.get(plan)
    if place is not None:
        remember_place(place)


def remember_place(place: str) -> None:
    """A map of this place was run forward by a recipe."""
    global _is_any  # noqa: PLW0603  (what graphs are guarded by)
    _start_anew()
    _by_recipe.add(place)
    _is_any = True


def backward_has_come() -> None:
    """A map was run backward: the next forward pass is of another step, or of all maps."""
    global _has_been_backward  # noqa: PLW0603
    _has_been_backward = True


def refuse_again(place: str, label: str) -> None:
    """Raises RuntimeError where the graph that is traced runs again without its recipe, see [Note: Lost recipes]."""
    if _is_any and torch.is_grad_enabled():
        torch.ops.te_dist.refuse_lost_recipe(_order, place, label, current_autocast().is_given)


def _refuse(_: Tensor, place: str, label: str, is_given: bool) -> None:
    if not in_backward():
        _start_anew()
    elif not is_given and place in _by_recipe:
        raise RuntimeError(
            f"{label}: a compiled linear map is run again in backward, by torch's checkpoint, outside of the autocast "
            "of its first pass: it would compute without the recipe. Pass context_fn=te_dist.recompute.context_fn to "
            "torch's checkpoint or checkpoint_wrapper, or use te_dist.checkpoint"
        )


def _start_anew() -> None:
    """Forgets what ran before the latest backward pass, in the first map that is run forward after it."""
    global _has_been_backward  # noqa: PLW0603
    if _has_been_backward and not in_backward():
        _by_recipe.clear()
        _has_been_backward = False


_NAME = define_writing("refuse_lost_recipe(Tensor(a!) order, str place, str label, bool is_given) -> ()")
LIBRARY.impl(_NAME, _refuse, "CPU")
torch.library.register_fake(f"te_dist::{_NAME}", lambda *_: None, lib=LIBRARY)
