"""What holds inside `with autocast(...)` and `with quantized_model_init(...)`."""

from __future__ import annotations

from contextlib import ContextDecorator
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from te_dist.recipe import Recipe

S = TypeVar("S")


@dataclass(frozen=True)
class Autocast:
    """How modules compute.

    Attributes:
        recipe: what inputs, weights and gradients are quantized into; None outside of autocast.
        amax_reduction_group: ranks that share the scales of delayed scaling; None for each rank alone.
    """

    recipe: Recipe | None = None
    amax_reduction_group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class ModelInit:
    """How modules make their weights.

    Attributes:
        recipe: whose weight format parameters are made in; None for plain ones.
        keeps_initial: whether the values before quantization are kept.
    """

    recipe: Recipe | None = None
    keeps_initial: bool = False


_autocast: ContextVar[Autocast] = ContextVar("te_dist_autocast", default=Autocast())  # noqa: B039 (frozen)
_model_init: ContextVar[ModelInit] = ContextVar("te_dist_model_init", default=ModelInit())  # noqa: B039


def current_autocast() -> Autocast:
    """What the innermost `autocast` says."""
    return _autocast.get()


def current_model_init() -> ModelInit:
    """What the innermost `quantized_model_init` says."""
    return _model_init.get()


class _Scope(ContextDecorator, Generic[S]):
    """Sets a context variable inside of a block; the same object may be entered again, also inside itself."""

    def __init__(self, variable: ContextVar[S], value: S) -> None:
        self._variable = variable
        self._value = value
        self._tokens: list[Token[S]] = []

    def __enter__(self) -> None:
        self._tokens.append(self._variable.set(self._value))

    def __exit__(self, *exception: Any) -> None:
        self._variable.reset(self._tokens.pop())


def autocast(
    enabled: bool = True, *, recipe: Recipe | None = None, amax_reduction_group: dist.ProcessGroup | None = None
) -> _Scope[Autocast]:
    """Modules compute by `recipe` inside of the block (or the function this decorates).

    Args:
        enabled: False computes in high precision, also inside of another `autocast`.
        recipe: formats by role.
        amax_reduction_group: ranks that share the scales of delayed scaling: one reduction per backward pass.

    Raises:
        ValueError: enabled without a recipe.
    """
    if not enabled:
        return _Scope(_autocast, Autocast())
    return _Scope(_autocast, Autocast(_given(recipe, "autocast"), amax_reduction_group))


def restore_autocast(state: Autocast) -> _Scope[Autocast]:
    """A block in which `current_autocast()` is `state`: how a recomputed forward pass sees what the first one saw."""
    return _Scope(_autocast, state)


def quantized_model_init(
    enabled: bool = True, *, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> _Scope[ModelInit]:
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
        return _Scope(_model_init, ModelInit())
    return _Scope(_model_init, ModelInit(_given(recipe, "quantized_model_init"), preserve_high_precision_init_val))


def _given(recipe: Recipe | None, name: str) -> Recipe:
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"{name} needs a recipe, got {recipe!r}; pass one of te_dist.recipe, such as "
            f"recipe=recipe.Float8BlockScaling(), or enabled=False"
        )
    return recipe
