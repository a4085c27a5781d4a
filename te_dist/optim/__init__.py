"""Optimizers that keep high-precision masters of quantized parameters, and clipping of gradients by their norm."""

from te_dist.optim import counting, refusal
from te_dist.optim.clipping import clip_grad_norm_
from te_dist.optim.fused_adam import FusedAdam
from te_dist.optim.master_weights import MasterWeights

__all__ = ["FusedAdam", "MasterWeights", "clip_grad_norm_"]

refusal.install()
counting.install()
