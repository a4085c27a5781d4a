"""Quantized tensors: storages that own bytes, and tensors that stand for their values."""

# These fill the op table.
from te_dist.tensor import aten, aten_values, redistribute  # noqa: F401  # pyright: ignore[reportUnusedImport]
from te_dist.tensor.cut import Cut
from te_dist.tensor.grouped_rows import GroupedRows, empty_rows
from te_dist.tensor.kind import StorageKind
from te_dist.tensor.quantized_tensor import OPS, QuantizedTensor, quantize
from te_dist.tensor.storage import Amaxes, QuantizedStorage, as_matrix, empty, find_amaxes

__all__ = [
    "OPS",
    "Amaxes",
    "Cut",
    "GroupedRows",
    "QuantizedStorage",
    "QuantizedTensor",
    "StorageKind",
    "as_matrix",
    "empty",
    "empty_rows",
    "find_amaxes",
    "quantize",
]
