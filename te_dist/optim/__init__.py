"""Optimizers that keep high-precision masters of quantized parameters, and clipping of gradients by their norm."""

from te_dist.optim.clipping import clip_grad_norm_
from te_dist.optim.fused_adam import FusedAdam

__all__ = ["FusedAdam", "clip_grad_norm_"]
