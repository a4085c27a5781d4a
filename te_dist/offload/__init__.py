"""Activations in host memory between forward and backward."""

from te_dist.offload.activations import activations
from te_dist.offload.layers import get_cpu_offload_context
from te_dist.offload.saved import mark_not_offload
from te_dist.offload.unit import Kept, Statistics

__all__ = ["Kept", "Statistics", "activations", "get_cpu_offload_context", "mark_not_offload"]
