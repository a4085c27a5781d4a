"""Backward passes of which no gradient is computed, and how many there were."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import function

_count = 0


def backward_count() -> int:
    """How many functions decorated by `once_differentiable` this process has run backward."""
    return _count


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of that name, which takes time only where there is a graph of backward (`create_graph`)."""
    refusing = function.once_differentiable(backward)

    @wraps(backward)
    def differentiate(ctx: Any, *grads: Any) -> Any:
        global _count  # noqa: PLW0603
        if torch.compiler.is_compiling():
            return refusing(ctx, *grads)
        _count += 1
        return refusing(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return differentiate
