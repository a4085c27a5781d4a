"""What torch's fused optimizers write is counted as written, as torch counts what its other optimizers write.

Weights that are kept quantized over microbatches, and masters, tell by these counts that something was written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from te_dist.tensor.placement import local_tensor


def install() -> None:
    """Has every fused `torch.optim.Optimizer` count."""
    register_optimizer_step_post_hook(count)


def count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Counts a write into all that a fused `optimizer` has updated."""
    groups = (group for group in optimizer.param_groups if group.get("fused"))
    written = [param for group in groups for param in group["params"] if param.grad is not None]
    written += [local for param in written if (local := local_tensor(param)) is not param]
    written = [tensor for tensor in written if not tensor.is_inference()]  # which have no count
    if written and not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(written)
