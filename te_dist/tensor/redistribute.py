"""Collectives by which DTensor and its users place quantized tensors: bytes are gathered and scattered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor  # noqa: F401  # pyright: ignore[reportUnusedImport]  (defines an op below)
from torch import Tensor
from torch.nn import functional

from te_dist._torch_private import is_placing, process_group
from te_dist.formats import Field, Group, Region, Span, geometry
from te_dist.tensor import rectangles
from te_dist.tensor.cut import Cut
from te_dist.tensor.parts import before_writing, lying_beside, note_broadcast, was_broadcast
from te_dist.tensor.quantized_tensor import OPS, QuantizedTensor, count_writes
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
    parts = rectangles.regions(own, group)
    if 1 in own.cut_dims or any(part.cols != parts[0].cols for part in parts):
        return rectangles.gather(tensor, parts, group)
    whole, cut = rectangles.joined(parts, rectangles.ROWS), _undone_cut(own)
    storage = QuantizedStorage(own.format, {}, whole, dtype=own.dtype)
    storage.cut_dims = frozenset({0}) if cut is not None and cut.of_part else frozenset()
    all_have_rows = all(part.shape[0] for part in parts)
    for field in own.format.canonical.fields:
        buffer, is_shared = own.buffers[field.name], field.is_shared(0)
        if is_shared and all_have_rows:
            storage.buffers[field.name] = buffer.clone()
            continue
        wires = rectangles.gathered_wires(field, buffer, parts, group=group)
        told = slice(1 if is_shared else None)  # NOTE: a rank without rows keeps its scale when a checkpoint is loaded
        storage.buffers[field.name] = geometry.assemble(field, wires[told], parts[told], whole)
    return tensor.like(storage, (world * tensor.shape[0], *tensor.shape[1:]))


def _undone_cut(own: QuantizedStorage) -> Cut | None:
    """The cut that a gather undoes: the last one; None for that of tensor parallelism, which is not noted.

    Where FSDP2 cut a part of a matrix over one rank, which left it whole, DTensor has nothing to gather over that rank.
    """
    cut = own.cut
    return None if cut is not None and cut.of_part and cut.leaves_all(own.region) else cut


@OPS.implements(torch.ops.c10d.scatter_.default)
def _scatter(func: Any, args: Any, kwargs: Any) -> tuple[list[QuantizedTensor], Any]:
    """Parts cut from one tensor, to each rank its own, in bytes; columns in equal parts only.

    Of a tensor that was broadcast before, ranks hold values, in plain tensors perhaps: these are scattered.
    """
    outputs, inputs, boxed, root, *rest = args
    own, group, work = outputs[0].storage, dist.ProcessGroup.unbox(boxed), None
    parts = _parts_from(own, group.size())
    place, cut = parts[group.rank()]
    if own.place != place:
        own.become(place)  # DTensor asks on every rank for what the first one gets
    own.cut = cut
    if was_broadcast(own):
        values = torch.empty(outputs[0].shape, dtype=outputs[0].dtype, device=own.device)
        padded = [[_padded(tensor) for tensor in inputs[0]]] if inputs else []
        _, work = func([values], padded, boxed, root, True, *rest[1:])
        dist.Work.unbox(work).wait()
        before_writing(own)
        own.quantize_(values.view(-1)[: torch.Size(own.shape).numel()].view(own.shape))
        return outputs, work
    for field in own.fields:
        widest = max(_nbytes(field, each) for each, _ in parts)
        received = torch.empty(widest, dtype=torch.uint8, device=own.device)
        sent = [[_flat(field, tensor.storage, widest) for tensor in inputs[0]]] if inputs else []
        _, work = func([received], sent, boxed, root, True, *rest[1:])
        dist.Work.unbox(work).wait()
        stored = geometry.compact(field, own.buffers[field.name], _region(own.place))
        stored.copy_(received[: _nbytes(field, own.place)].view(field.dtype).view(stored.shape))
    return outputs, work


def _parts_from(first: QuantizedStorage, world: int) -> Sequence[tuple[Any, Any]]:
    """(place, cut) of all ranks' parts; of columns, which do not know what they were cut from, `first` is the first."""
    if (beside := lying_beside(first)) is not None:
        return beside
    if first.cut is not None:
        return [(place, first.cut) for place in first.cut.parts(world)]
    place, cols = first.place, _region(first.place).cols
    regions = [Region(_region(place).rows, Span(cols.start + i * len(cols), len(cols))) for i in range(world)]
    return [(Group(place.members, region) if isinstance(place, Group) else region, None) for region in regions]


def _padded(tensor: QuantizedTensor) -> Tensor:
    """Values of a part, filled up with zeros to its nominal shape."""
    values = tensor.storage.dequantize(tensor.dtype).view(-1)
    return functional.pad(values, (0, tensor.shape.numel() - len(values))).view(tensor.shape)


def _region(place: Any) -> Region:
    return place.region if isinstance(place, Group) else place


def _nbytes(field: Field, place: Any) -> int:
    return (len(place.members) if isinstance(place, Group) else 1) * field.compact_bytes(_region(place))


def _flat(field: Field, storage: QuantizedStorage, size: int) -> Tensor:
    """Bytes of the unpadded `field`, filled up to `size`."""
    own = geometry.compact(field, storage.buffers[field.name], _region(storage.place)).contiguous()
    return functional.pad(own.view(-1).view(torch.uint8), (0, size - own.nbytes))


@OPS.implements(torch.ops.c10d.broadcast_.default)
def _broadcast(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], Any]:
    """Values in the nominal dtype, since other ranks may hold plain tensors; quantized ones there quantize them.

    Bytes where DTensor makes copies, as it does of what all ranks hold alike.
    """
    tensors, group, root, index, *rest = args
    is_source = dist.ProcessGroup.unbox(group).rank() == root
    if is_placing() and not was_broadcast(tensors[0].storage):
        return tensors, _broadcast_bytes(tensors[0].storage, func, args[1:])
    plain = [_values(tensor, known=is_source) for tensor in tensors]
    _, work = func(plain, group, root, index, True, *rest[1:])
    dist.Work.unbox(work).wait()
    for tensor, values in zip(tensors, plain, strict=True):
        if isinstance(tensor, QuantizedTensor):
            if not is_source:  # NOTE: parts too, which other ranks have sent
                before_writing(tensor.storage)
                tensor.storage.quantize_(values)
                count_writes(tensor)
            note_broadcast(tensor.storage)
    return tensors, work


def _broadcast_bytes(own: QuantizedStorage, func: Any, rest: Sequence[Any]) -> Any:
    """The canonical bytes of `own`, from the rank that has them; where they are its own a storage is left as it is."""
    group, root, index, _, *others = rest
    fields, region = own.format.sufficient(own.buffers), _region(own.place)
    buffers, is_new, work = {field.name: own.buffers[field.name].clone() for field in fields}, False, None
    for field in fields:
        stored = geometry.compact(field, buffers[field.name], region)
        before = stored.contiguous().view(-1).view(torch.uint8)
        sent = before.clone()
        _, work = func([sent], group, root, index, True, *others)
        dist.Work.unbox(work).wait()
        if not torch.equal(sent, before):
            stored.copy_(sent.view(field.dtype).view(stored.shape))
            is_new = True
    if is_new:
        before_writing(own)
        own.copy_(own.holding(buffers))
    return work


def _values(tensor: Tensor, *, known: bool) -> Tensor:
    if not isinstance(tensor, QuantizedTensor):
        return tensor
    return tensor.decoded() if known else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


@OPS.implements(*WAITS)
def _wait(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """Nothing: what was gathered is there."""
    return args[0]
