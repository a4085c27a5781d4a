"""Activation checkpointing."""

from te_dist.recompute.checkpoint import checkpoint, context_fn, context_fn_with

__all__ = ["checkpoint", "context_fn", "context_fn_with"]
