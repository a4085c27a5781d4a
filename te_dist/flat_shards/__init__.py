"""Weights of which every rank updates a contiguous range of the flattened values, as ZeRO-style optimizers cut them."""

from te_dist.flat_shards.masters import quantize_master_weights
from te_dist.flat_shards.planes import post_all_gather_processing, raw_data, raw_range, replace_raw_data

__all__ = [
    "post_all_gather_processing",
    "quantize_master_weights",
    "raw_data",
    "raw_range",
    "replace_raw_data",
]
