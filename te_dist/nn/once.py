"""Backward passes of which no gradient is computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import function


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of that name, which takes time only where there is a graph of backward (`create_graph`)."""
    refusing = function.once_differentiable(backward)

    @wraps(backward)
    def differentiate(ctx: Any, *grads: Any) -> Any:
        return refusing(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return differentiate
