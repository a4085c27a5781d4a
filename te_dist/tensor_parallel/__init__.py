"""Tensor and sequence parallelism over quantized tensors."""

from te_dist.tensor_parallel.gather import all_reduce, gather, reduce_scatter, replicate

__all__ = ["all_reduce", "gather", "reduce_scatter", "replicate"]
