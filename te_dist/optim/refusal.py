"""Steps that would train nothing, or lose what they train, are refused before they are made.

Optimizers that know nothing of quantization could step on quantized parameters: every op they use is defined on
quantized tensors. But an update is smaller than the distance between two codes, so that most of it would be rounded
away, at every step and without a word. And an optimizer that was made before weights were exchanged for quantized ones,
or for shards, holds weights that no module has any more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from te_dist.optim.masters import is_quantized
from te_dist.tensor.exchanged import exchange_of


def install() -> None:
    """Makes every `torch.optim.Optimizer` look at its parameters before it steps."""
    register_optimizer_step_pre_hook(refuse)


def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raises RuntimeError where `optimizer` would update codes, or weights that are nobody's."""
    params = [(index, param) for index, group in enumerate(optimizer.param_groups) for param in group["params"]]
    _refuse_exchanged(optimizer, [param for _, param in params])
    if getattr(optimizer, "writes_quantized_parameters", False):
        return
    for index, param in params:
        if param.grad is not None and is_quantized(param):
            name = type(optimizer).__name__
            raise RuntimeError(
                f"{name} would update a quantized parameter of shape {tuple(param.shape)}, in group {index}, "
                "without a master: steps smaller than the distance of two codes are lost; use te_dist.optim."
                f"MasterWeights(params, lambda params: {name}(params, ...)) or te_dist.optim.FusedAdam. (An "
                "optimizer that rounds codes on purpose sets writes_quantized_parameters = True)"
            )


def _refuse_exchanged(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> None:
    """Not of a weight that is frozen, or has a gradient of another model that still has it."""
    idle = (param for param in params if param.requires_grad and param.grad is None)
    found = [exchange for param in idle if (exchange := exchange_of(param)) is not None]
    if found:
        names = [exchange.name for exchange in found]
        raise RuntimeError(
            f"{type(optimizer).__name__} holds {len(found)} weights that {found[0].by} has exchanged for others, "
            f"{', '.join(names[:4])}{', ...' if names[4:] else ''}, and would train none of these; make the optimizer "
            "after the model is converted and sharded"
        )
