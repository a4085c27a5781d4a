"""Quantized weights that are trained outside of any `autocast`, which is easily forgotten."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from te_dist.context import is_in_autocast
from te_dist.tensor import QuantizedTensor

_has_warned = False


def warn(weight: Tensor, site: Any) -> None:
    """Once, where `weight` is quantized and trained, and no block says how, not even `autocast(enabled=False)`.

    `site`: the `LinearSite` that it is multiplied by, for the message.
    """
    global _has_warned  # noqa: PLW0603
    if _has_warned or is_in_autocast() or not isinstance(weight, QuantizedTensor):
        return
    if weight.requires_grad and torch.is_grad_enabled():
        _has_warned = True
        label = site.name or f"{site.module_type} ({site.in_features} to {site.out_features})"
        warnings.warn(
            f"{label}: a quantized weight is trained outside of te_dist.autocast, where its values are multiplied in "
            "high precision; put the forward pass into te_dist.autocast(recipe=...), or into "
            "te_dist.autocast(enabled=False) where this is meant",
            stacklevel=2,
        )
