"""Plans by the names that graphs know them by.

[Note: Plans in graphs]
A graph says how a map is computed by a text: what kind of map it is, the recipe, the map's name and sizes, and where it
runs. It is found while a graph is traced. A graph that another process has traced (`torch.export.save`) comes with the
text alone: the plan is made again from it, by those who make plans of maps of that kind (`MAKERS`).
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable
from typing import NamedTuple
from uuid import uuid4

import torch

from te_dist._torch_private import process_group
from te_dist.context import recipe_named
from te_dist.kernels.runtime import target_of
from te_dist.nn import lost_recipes
from te_dist.nn.plan import Plan
from te_dist.nn.spelled import made_of
from te_dist.recipe import Recipe

# Of what ops return, in all names of plans: compilers keep graphs on disk, and would run those of another te_dist.
REVISION = 4
# By kind of maps: (recipe or None, `LinearSite.place`, dtype of the input, target) -> the plan, None where it needs
# more than tensors.
MAKERS: dict[str, Callable[[Recipe | None, str, torch.dtype, str], Plan | None]] = {}
_PROCESS = uuid4().hex
_plans: dict[str, Plan] = {}


class _Name(NamedTuple):
    """What a text says.

    Attributes:
        kind: of maps.
        recipe: its text; "" for none.
        place: of the map, see `LinearSite`; "" for all.
        dtype: of the input.
        target: see `kernels.runtime.target_of`.
        trains: whether the map may run again in backward, which `lost_recipes` watches.
        process: of a recipe with a function, of which there is an address only, which means nothing to other processes.
        revision: `REVISION`.
    """

    kind: str
    recipe: str
    place: str
    dtype: str
    target: str
    trains: bool = False
    process: str = ""
    revision: int = REVISION


@torch.compiler.assume_constant_result
def name_for_graphs(
    kind: str, recipe: str, places: tuple[str, str], *, dtype: torch.dtype, device: torch.device, trains: bool
) -> str | None:
    """The name of the plan by which graphs compute a map; None where it needs more than tensors.

    Args:
        kind: of maps.
        recipe: name of one that an `autocast` has met; "" for none.
        places: of the map as the recipe sees it, and its `graph_place`.
        dtype: of the input.
        device: of the weight.
        trains: whether it may run again in backward.
    """
    made_by, target = recipe_named(recipe), target_of(device)
    plan = MAKERS[kind](made_by, places[0], dtype, target)
    if plan is None:
        return None
    name = _Name(kind, "", "", str(dtype), "")
    if made_by is not None:
        process = _PROCESS if " at 0x" in recipe else ""
        name = _Name(kind, recipe, places[0], str(dtype), target, trains, process)
    text = repr(tuple(name))
    if trains and made_by is not None:
        lost_recipes.know(text, places[1])
    _plans.setdefault(text, plan)
    return text


def plan_named(text: str) -> Plan:
    """The plan of this name. See [Note: Plans in graphs].

    Raises:
        RuntimeError: another process has made the graph, by what cannot be made again here.
    """
    plan = _plans.get(text)
    if plan is None or _is_of_the_past(plan):
        plan = _plans[text] = _made_again(text)
    return plan


def _is_of_the_past(plan: Plan) -> bool:
    """Whether it is over ranks of a group that is gone, whose name another one has now."""
    return plan.cut_over is not None and process_group(plan.cut_over.group_name) is not plan.cut_over


@torch.compiler.assume_constant_result
def reads_gradients_once(text: str) -> bool:
    """See `Plan`, of that of this name."""
    return plan_named(text).reads_gradients_once


@torch.compiler.assume_constant_result
def draws(text: str, *roles: str) -> bool:
    """See `Plan`, of that of this name."""
    return plan_named(text).draws(*roles)


@torch.compiler.assume_constant_result
def row_multiple_of(text: str) -> int:
    """See `Plan`, of that of this name."""
    return plan_named(text).row_multiple


def _made_again(text: str) -> Plan:
    try:
        name = _Name(*literal_eval(text))
        dtype = made_of(name.dtype)
        plan = MAKERS[name.kind](made_of(name.recipe) if name.recipe else None, name.place, dtype, name.target)
    except (ValueError, TypeError, KeyError, SyntaxError) as error:
        raise _unknown(text) from error
    if plan is None or name.revision != REVISION:
        raise _unknown(text)
    return plan


def _unknown(text: str) -> RuntimeError:
    return RuntimeError(
        f"a graph that another process has made computes by {text}, which cannot be made again here; wanted one of "
        "this te_dist, by a recipe without functions and histories: compile or export it again"
    )
