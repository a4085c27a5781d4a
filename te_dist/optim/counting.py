"""What torch's fused optimizers write is counted as written, as torch counts what its other optimizers write.

Weights that are kept quantized over microbatches, and masters, tell by these counts that something was written.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from te_dist.tensor.placement import local_tensor

_updated: WeakKeyDictionary[torch.optim.Optimizer, list[Tensor]] = WeakKeyDictionary()  # by steps that are under way


def install() -> None:
    """Has every fused `torch.optim.Optimizer` count."""
    register_optimizer_step_pre_hook(begin)
    register_optimizer_step_post_hook(count)


def begin(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Notes what a fused `optimizer` is going to update: hooks behind its step may drop gradients."""
    if updated := _with_gradients(optimizer):
        _updated[optimizer] = updated


def count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Counts a write into all that a fused `optimizer` has updated, by gradients that a closure has found too."""
    written = list({id(param): param for param in (*_updated.pop(optimizer, ()), *_with_gradients(optimizer))}.values())
    written += [local for param in written if (local := local_tensor(param)) is not param]
    written = [tensor for tensor in written if not tensor.is_inference()]  # which have no count
    if written and not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(written)


def _with_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    if getattr(optimizer, "writes_quantized_parameters", False):  # which counts by itself
        return []
    groups = (group for group in optimizer.param_groups if group.get("fused"))
    return [param for group in groups for param in group["params"] if param.grad is not None]
