"""Groups of quantized matrices, such as the weights of experts: one buffer per field, members as views."""

from te_dist.grouped import aten, redistribute  # noqa: F401  (they fill the op table)
from te_dist.grouped.grouped_tensor import OPS, GroupedTensor, empty, join, quantize
from te_dist.grouped.placing import first_member, place_whole, quantized_part
from te_dist.grouped.storage import GroupCut, GroupedStorage, Values

__all__ = [
    "OPS",
    "GroupCut",
    "GroupedStorage",
    "GroupedTensor",
    "Values",
    "empty",
    "first_member",
    "join",
    "place_whole",
    "quantize",
    "quantized_part",
]
