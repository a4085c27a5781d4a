"""Tensor and sequence parallelism over quantized tensors."""

from te_dist.tensor_parallel.gather import all_reduce, gather, gather_values, reduce_scatter, replicate
from te_dist.tensor_parallel.styles import ColumnParallel, GatherInput, RowParallel, SequenceParallel

__all__ = [
    "ColumnParallel",
    "GatherInput",
    "RowParallel",
    "SequenceParallel",
    "all_reduce",
    "gather",
    "gather_values",
    "reduce_scatter",
    "replicate",
]
