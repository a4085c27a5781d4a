"""DTensor's `Shard(0)` to `Replicate()` of quantized parts: bytes are gathered, nothing is dequantized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.tensor  # noqa: F401  (defines the ops below)
from torch import Tensor
from torch.nn import functional

from te_dist._torch_private import process_group
from te_dist.formats import Field, Region, Span, geometry
from te_dist.tensor import collectives
from te_dist.tensor.quantized_tensor import OPS, QuantizedTensor
from te_dist.tensor.storage import QuantizedStorage

WAITS = [torch.ops._c10d_functional.wait_tensor.default]
if hasattr(torch.ops._c10d_functional, "_wrap_tensor_autograd"):  # later than torch 2.11
    WAITS.append(torch.ops._c10d_functional._wrap_tensor_autograd.default)


@OPS.implements(torch.ops._c10d_functional.all_gather_into_tensor.default)
def _all_gather(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """Row parts cut from one tensor, put together from their canonical bytes; rows of padding stay in name only."""
    tensor, world, name = args
    group = process_group(name)
    own = tensor.storage
    if own.unsettled is not None:
        raise RuntimeError(
            "high-precision values were written into parts, each by its own scales, which are none of the whole; call "
            "te_dist.fsdp2.settle(model) before gathering them"
        )
    if 1 in own.cut_dims:
        raise NotImplementedError(
            "columns of a quantized tensor are not gathered through DTensor: a weight that tensor parallelism cuts by "
            "columns is had whole from te_dist.checkpoints.save, or in high precision from export_safetensors"
        )
    whole, parts = _cut(own, group.rank(), world)
    storage = QuantizedStorage(own.format, {}, whole, dtype=own.dtype)
    storage.cut_dims = frozenset({0}) if own.cut is not None and own.cut.of_part else frozenset()
    for field in own.format.canonical.fields:
        buffer = own.buffers[field.name]
        if not field.is_shared(0):
            buffer = geometry.assemble(field, _wires(field, buffer, parts, group), parts, whole)
        storage.buffers[field.name] = buffer
    return tensor.like(storage, (world * tensor.shape[0], *tensor.shape[1:]))


def _cut(own: QuantizedStorage, rank: int, world: int) -> tuple[Region, tuple[Region, ...]]:
    """The region that `world` ranks hold together, and that of every rank: as it was cut, else equal parts."""
    if own.cut is not None:
        whole, parts = own.cut.region, own.cut.parts(world)
    else:
        rows = own.region.rows
        whole = Region(Span(max(rows.start - rank * len(rows), 0), world * len(rows)), own.region.cols)
        parts = whole.chunk(world)
    if parts[rank] != own.region:
        raise ValueError(
            f"rank {rank} has {own.region} of a whole, no part {rank} of {world}, which is {parts[rank]}: it was "
            "quantized alone, or cut over other ranks; te_dist.tensor_parallel.gather quantizes parts as the whole"
        )
    return whole, parts


@OPS.implements(*WAITS)
def _wait(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """Nothing: what was gathered is there."""
    return args[0]


def _wires(field: Field, buffer: Tensor, parts: Sequence[Region], group: Any) -> list[Tensor]:
    """The wire of `field` of every part, sent as bytes; shorter ones are filled up to the longest."""
    own = geometry.compact(field, buffer, parts[group.rank()]).contiguous().view(-1).view(torch.uint8)
    sizes = [field.compact_bytes(part) for part in parts]
    sent = functional.pad(own, (0, max(sizes) - own.numel()))
    rows = collectives.all_gather(sent, group).view(group.size(), -1).unbind()
    return [
        row[:size].view(field.dtype).view(field.compact_shape(part))
        for row, size, part in zip(rows, sizes, parts, strict=True)
    ]
