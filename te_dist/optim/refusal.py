"""Optimizers that know nothing of quantization do not step on quantized parameters.

They would: every op they use is defined on quantized tensors. But an update is smaller than the distance between two
codes, so that most of it would be rounded away, at every step and without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from te_dist.optim.masters import is_quantized


def install() -> None:
    """Makes every `torch.optim.Optimizer` look at its parameters before it steps."""
    register_optimizer_step_pre_hook(refuse)


def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raises RuntimeError where `optimizer` would update codes."""
    if getattr(optimizer, "writes_quantized_parameters", False):
        return
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param.grad is not None and is_quantized(param):
                name = type(optimizer).__name__
                raise RuntimeError(
                    f"{name} would update a quantized parameter of shape {tuple(param.shape)}, in group {index}, "
                    "without a master: steps smaller than the distance of two codes are lost; use te_dist.optim."
                    f"MasterWeights(params, lambda params: {name}(params, ...)) or te_dist.optim.FusedAdam. (An "
                    "optimizer that rounds codes on purpose sets writes_quantized_parameters = True)"
                )
