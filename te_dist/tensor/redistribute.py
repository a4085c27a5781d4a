"""DTensor's `Shard(0)` to `Replicate()` of quantized parts: bytes are gathered, nothing is dequantized."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.tensor  # noqa: F401  (defines the ops below)
from torch import Tensor

from te_dist._torch_private import process_group
from te_dist.formats import Region, geometry
from te_dist.tensor import collectives
from te_dist.tensor.quantized_tensor import OPS, QuantizedTensor
from te_dist.tensor.storage import QuantizedStorage

_WAITS = [torch.ops._c10d_functional.wait_tensor.default]
if hasattr(torch.ops._c10d_functional, "_wrap_tensor_autograd"):  # later than torch 2.11
    _WAITS.append(torch.ops._c10d_functional._wrap_tensor_autograd.default)


@OPS.implements(torch.ops._c10d_functional.all_gather_into_tensor.default)
def _all_gather(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """Row parts of equal length, cut from one tensor, put together from their canonical bytes."""
    tensor, world, name = args
    group = process_group(name)
    own = tensor.storage
    rows, rank = own.region.rows, group.rank()
    start = rows.start - rank * len(rows)
    if start < 0:
        raise ValueError(
            f"rank {rank} has rows {rows.start} to {rows.stop} of a whole, no part {rank} of {world} equal ones: it "
            "was quantized alone; te_dist.tensor_parallel.gather quantizes parts as the whole"
        )
    whole = Region(type(rows)(start, world * len(rows)), own.region.cols)
    parts = [whole.narrow(0, index * len(rows), len(rows)) for index in range(world)]
    storage = QuantizedStorage(own.format, {}, whole, dtype=own.dtype)
    for field in own.format.canonical.fields:
        buffer = own.buffers[field.name]
        if not field.is_shared(0):
            wire = geometry.compact(field, buffer, own.region).contiguous()
            wires = _gathered(wire, group).unbind()
            buffer = geometry.assemble(field, wires, parts, whole)
        storage.buffers[field.name] = buffer
    return tensor.like(storage, (world * tensor.shape[0], *tensor.shape[1:]))


@OPS.implements(*_WAITS)
def _wait(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """Nothing: what was gathered is there."""
    return args[0]


def _gathered(wire: Tensor, group: Any) -> Tensor:
    """(world, outer, inner) from every rank's wire (outer, inner), sent as bytes."""
    flat = collectives.all_gather(wire.view(-1).view(torch.uint8), group)
    return flat.view(wire.dtype).view(group.size(), *wire.shape)
