"""Activation checkpointing."""

from te_dist.recompute.checkpoint import checkpoint, context_fn

__all__ = ["checkpoint", "context_fn"]
