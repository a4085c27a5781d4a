"""Optimizers that keep high-precision masters of quantized parameters."""

from te_dist.optim.fused_adam import FusedAdam

__all__ = ["FusedAdam"]
