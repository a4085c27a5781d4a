"""Backward passes of which no gradient is computed, and how many there were."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import function

_count = 0
torch_once_differentiable: Callable[[Callable[..., Any]], Callable[..., Any]] = function.once_differentiable


def backward_count() -> int:
    """How many functions decorated by `once_differentiable` this process has run backward."""
    return _count


class Waiting:
    """A function of autograd that is decorated by `once_differentiable`, by its context, and waits for backward."""

    __slots__ = ("_function", "was_run")

    def __init__(self, ctx: Any) -> None:
        self._function = weakref.ref(ctx)
        self.was_run = False
        ctx.waiting = self

    @property
    def waits(self) -> bool:
        """Whether it is there, and has not been run backward."""
        return not self.was_run and self._function() is not None


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of that name, which takes time only where there is a graph of backward (`create_graph`)."""
    refusing = torch_once_differentiable(backward)

    @wraps(backward)
    def differentiate(ctx: Any, *grads: Any) -> Any:
        global _count  # noqa: PLW0603
        if torch.compiler.is_compiling():
            return refusing(ctx, *grads)
        _count += 1
        if (waiting := getattr(ctx, "waiting", None)) is not None:
            waiting.was_run = True
        return refusing(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return differentiate
