"""What holds inside `with autocast(...)` and `with quantized_model_init(...)`."""

from __future__ import annotations

import threading
import warnings
from contextlib import ContextDecorator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_dist._torch_private import in_backward, is_autocast_anywhere
from te_dist.elsewhere import Elsewhere, leads
from te_dist.recipe import UNIFORM, Recipe
from te_dist.tensor import QuantizedTensor


@dataclass(frozen=True)
class Autocast:
    """How modules compute.

    Attributes:
        recipe: what inputs, weights and gradients are quantized into; None outside of autocast.
        amax_reduction_group: ranks that share the scales of delayed scaling; None for each rank alone.
        name: of the recipe, see `recipe_named`; what compiled code is guarded by.
        is_uniform: whether the recipe answers maps of one kind alike, whatever their names.
    """

    recipe: Recipe | None = None
    amax_reduction_group: dist.ProcessGroup | None = None
    name: str = ""
    is_uniform: bool = False


@dataclass(frozen=True)
class ModelInit:
    """How modules make their weights.

    Attributes:
        recipe: whose weight format parameters are made in; None for plain ones.
        keeps_initial: whether the values before quantization are kept.
    """

    recipe: Recipe | None = None
    keeps_initial: bool = False


_OUTSIDE, _DISABLED, _PLAIN = Autocast(), Autocast(), ModelInit()  # the first two differ for `is_in_autocast` alone
# NOTE: of each thread, as torch's autocast is; torch.compile follows and guards these attributes, but no ContextVar.
_current = threading.local()
_states: dict[Recipe, Autocast] = {}
_named: dict[str, Recipe] = {}

_OF_AUTOCAST: Elsewhere = {
    "fp8_recipe": (None, "its name is recipe here"),
    "fp8_group": (None, "its name is amax_reduction_group here"),
    "calibrating": (
        False,
        "histories of delayed scaling fill while a model is trained, and Float8CurrentScaling needs none; leave it out",
    ),
}


def current_autocast() -> Autocast:
    """What the innermost `autocast` says."""
    return getattr(_current, "autocast", _OUTSIDE)


def is_in_autocast() -> bool:
    """Whether a block says how modules compute, by a recipe or without."""
    return current_autocast() is not _OUTSIDE


def repeated_autocast() -> Autocast | None:
    """As `current_autocast`, of a block that a forward pass has entered which is run again in backward.

    None where it has entered none: what surrounds backward says nothing of the pass. While a graph is traced, of every
    block in it, since it is in the graph whenever that runs.
    """
    return getattr(_current, "repeated", None)


def lasting_autocast() -> Autocast | None:
    """What a forward pass that begins here is to be run again under; None where that is not known.

    As in a pass that torch's checkpoint runs again by itself: what surrounds backward was not there at first. A graph
    that is traced runs as a whole, and again as it ran.
    """
    if torch.compiler.is_compiling():
        return None
    return repeated_autocast() if in_backward() else current_autocast()


def current_model_init() -> ModelInit:
    """What the innermost `quantized_model_init` says. Asked by those who make weights, see `_ModelInitScope`."""
    _current.weights_made = getattr(_current, "weights_made", 0) + 1
    return getattr(_current, "model_init", _PLAIN)


class Scope(ContextDecorator):
    """Sets what holds inside of a block; the same object may be entered again, inside itself and by other threads."""

    def __init__(self, name: str, value: Autocast | ModelInit, default: Autocast | ModelInit) -> None:
        self._name, self._value, self._default = name, value, default

    def __enter__(self) -> None:
        outer = getattr(_current, self._name, self._default)
        _current.outer = (outer, getattr(_current, "outer", None))  # of this thread: innermost first
        setattr(_current, self._name, self._value)

    def __exit__(self, *exception: Any) -> None:
        outer, _current.outer = _current.outer
        setattr(_current, self._name, outer)


class _ModelInitScope(Scope):
    """Warns where nothing was made inside that it could have quantized."""

    def __enter__(self) -> None:
        super().__enter__()
        _current.outer = (getattr(_current, "weights_made", 0), _current.outer)

    def __exit__(self, *exception: Any) -> None:
        made, _current.outer = _current.outer
        super().__exit__(*exception)
        if exception[0] is None and made == getattr(_current, "weights_made", 0):
            warnings.warn(
                "quantized_model_init: te_dist made no weights inside of the block, and so quantized none; "
                "torch.nn.Linear, and experts of models that others wrote, are exchanged by te_dist.convert",
                stacklevel=2,
            )


class _AutocastScope(Scope):
    """Says as well whether it was entered in backward, see `repeated_autocast`."""

    def __enter__(self) -> None:
        super().__enter__()
        _current.outer = (repeated_autocast(), _current.outer)
        is_repeated = torch.compiler.is_compiling() or in_backward()
        _current.repeated = self._value if is_repeated else None

    def __exit__(self, *exception: Any) -> None:
        _current.repeated, _current.outer = _current.outer
        super().__exit__(*exception)


@leads(_OF_AUTOCAST, name="autocast")
def autocast(
    enabled: bool = True, *, recipe: Recipe | None = None, amax_reduction_group: dist.ProcessGroup | None = None
) -> Scope:
    """Modules compute by `recipe` inside of the block (or the function this decorates).

    Args:
        enabled: False computes in high precision, also inside of another `autocast`.
        recipe: formats by role.
        amax_reduction_group: ranks that share the scales of delayed scaling: one reduction per backward pass.

    Raises:
        ValueError: enabled without a recipe, or a keyword of TransformerEngine that is not here.
        TypeError: `amax_reduction_group` is no process group that this rank is in.
    """
    if not enabled:
        return restore_autocast(_DISABLED)
    state = _state_of(_given(recipe, "autocast", enabled))
    if not (amax_reduction_group is None or isinstance(amax_reduction_group, dist.ProcessGroup)):
        raise TypeError(
            f"autocast: amax_reduction_group: got {amax_reduction_group!r}, wanted a process group that this rank is "
            "in, as mesh.get_group() of a DeviceMesh, or None"
        )
    return restore_autocast(
        state if amax_reduction_group is None else replace(state, amax_reduction_group=amax_reduction_group)
    )


def restore_autocast(state: Autocast) -> Scope:
    """A block in which `current_autocast()` is `state`: how a recomputed forward pass sees what the first one saw."""
    return _AutocastScope("autocast", state, _OUTSIDE)


def quantized_model_init(
    enabled: bool = True, *, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Scope:
    """Modules made inside of the block have quantized weights, without a high-precision copy.

    Args:
        enabled: False makes plain weights, also inside of another `quantized_model_init`.
        recipe: whose format for weights is used.
        preserve_high_precision_init_val: keep the values before quantization on the CPU, so that an optimizer can
            start its masters from them: `parameter.get_high_precision_init_val()`, then
            `parameter.clear_high_precision_init_val()`.

    Raises:
        ValueError: enabled without a recipe.
    """
    if not enabled:
        return Scope("model_init", _PLAIN, _PLAIN)
    value = ModelInit(_given(recipe, "quantized_model_init", enabled), preserve_high_precision_init_val)
    return _ModelInitScope("model_init", value, _PLAIN)


def _given(recipe: Recipe | None, name: str, enabled: object) -> Recipe:
    if isinstance(enabled, Recipe):
        raise ValueError(f"{name} takes the recipe by keyword, got it as `enabled`; write {name}(recipe=...)")
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"{name} needs a recipe, got {recipe!r}; pass one of te_dist.recipe, such as "
            f"recipe=recipe.Float8BlockScaling(), or enabled=False"
        )
    return recipe


def recipe_named(name: str) -> Recipe | None:
    """The recipe that an `autocast` of this name computes by; None for that of none."""
    return _named.get(name)


def _state_of(recipe: Recipe) -> Autocast:
    """Inside of an `autocast` of this recipe alone. Equal recipes have the same name, others have not."""
    state = _states.get(recipe)
    return _named_state(recipe) if state is None else state


@torch.compiler.disable(
    reason="a recipe gets its name outside of graphs, and no autocast has met this one: call "
    "te_dist.autocast(recipe=...) once before, or leave out fullgraph=True"
)
def _named_state(recipe: Recipe) -> Autocast:
    # NOTE: kept for good, so that an address in a text stays that of the same object.
    text = repr(recipe)
    name = f"{text} {len(_named)}" if text in _named else text
    state = _states[recipe] = Autocast(recipe, name=name, is_uniform=type(recipe) in UNIFORM)
    _named[name] = recipe
    return state


def autocast_of_torch(x: Tensor) -> Tensor:
    """`x` in the dtype of `torch.autocast` inside of it; quantized ones as they are."""
    if not torch.compiler.is_compiling() and not is_autocast_anywhere():
        return x
    kind = x.device.type
    if kind == "meta" or isinstance(x, QuantizedTensor) or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
