"""What torch.distributed.checkpoint asks of the tensors that it saves and fills.

A quantized tensor is saved as it is: each rank's shard with its region. Where shards are cut in another way than those
saved, DCP fills them piece by piece, through slices that it takes for views. What it is handed out writes through:
bytes of the same place in the same format are taken over as they are, scales of tiles that a cut goes through among
them, since all pieces were cut from one matrix. Other values (of a plain checkpoint) are put together and quantized
once all are there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from te_dist.formats import Field, Group, Region, geometry
from te_dist.tensor import placement
from te_dist.tensor.parts import before_writing, filled_by, note_filled
from te_dist.tensor.storage import Cut, QuantizedStorage, empty


@dataclass
class _Pieces:
    """What of a storage was filled.

    Attributes:
        places: of the pieces that were given.
        values: (as the storage), fp32, of all pieces; None as long as all of them were bytes.
    """

    places: list[Any] = field(default_factory=list)
    values: Tensor | None = None


_PIECES: weakref.WeakKeyDictionary[QuantizedStorage, _Pieces] = weakref.WeakKeyDictionary()


def items_to_write(local: Tensor, name: str, whole: Tensor) -> list[WriteItem]:
    """What this rank writes of `whole`, a DTensor around the quantized `local`, or `local` itself.

    Raises:
        RuntimeError: the shard has scales of its own, which are none of the whole.
    """
    if storage_of(local).unsettled is not None:
        raise RuntimeError(
            f"{name}: high-precision values were written into shards, each by its own scales; call "
            "fsdp2.settle(model) before saving, so that all shards share those of the whole"
        )
    if whole.numel() and not local.numel():
        return []
    start = placement.local_start(whole) if isinstance(whole, DTensor) else (0,) * whole.dim()
    chunk = ChunkStorageMetadata(offsets=torch.Size(start), sizes=local.shape)
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=whole.dtype), size=whole.shape)
    return [WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]


def chunk_of_rest(local: Tensor) -> ChunkStorageMetadata | None:
    """What a rank without rows reads of a matrix whose scales it shares: all of it. None for any other shard."""
    storage = storage_of(local)
    cut = storage.cut
    if local.numel() or not isinstance(cut, Cut) or not cut.shape.numel() or not storage.may_share_scales():
        return None
    first = (cut.region.rows.start // cut.unit, *(0,) * (len(cut.shape) - 2), cut.region.cols.start)
    return ChunkStorageMetadata(offsets=torch.Size(first), sizes=cut.shape)


def to_fill(local: Tensor) -> tuple[QuantizedStorage, torch.Size]:
    """A storage and the nominal shape of what was said to be read: what is copied into it, or into parts of it, is
    written into the shard."""
    storage, chunk = storage_of(local), chunk_of_rest(local)
    if chunk is None:
        return note_filled(storage.map(lambda buffer: buffer), storage), local.shape
    blank = empty(storage.format, storage.cut.region, dtype=storage.dtype, device=storage.device)  # type: ignore[union-attr]
    return note_filled(blank, storage), chunk.sizes


def storage_of(tensor: Any) -> Any:
    """The storage of a quantized tensor; None of a plain one."""
    storage = getattr(tensor, "storage", None)
    return storage if isinstance(storage, QuantizedStorage) else None


def fill(target: Any, source: Any) -> bool:
    """Writes what is copied into a part of a shard that is filled; False where `target` is no such part."""
    own, given = storage_of(target), storage_of(source)
    whole = filled_by(own)
    if whole is None:
        return False
    before_writing(whole)
    has_bytes = given is not None and given.format == whole.format and given.place == own.place
    if has_bytes and own.place == whole.place:
        _PIECES.pop(whole, None)
        whole.copy_(given)
    elif not all(whole.shape):
        _fill_shared(whole, given if has_bytes else None)
    else:
        values = (source if given is None else source.dequantize()).detach().expand(target.shape)
        if own.place == whole.place:
            _quantize(whole, values.to(whole.device))
        else:
            _fill_piece(whole, own, given if has_bytes else None, values)
    return True


def _quantize(whole: QuantizedStorage, values: Tensor) -> None:
    """What held the values that it was quantized from holds these now."""
    keeps = whole.initial is not None
    whole.quantize_(values)
    if keeps:
        whole.note_initial(values)


def _fill_shared(whole: QuantizedStorage, given: QuantizedStorage | None) -> None:
    """Of a shard without rows: the values that all shards hold; or that scales are still to be agreed on."""
    if given is None:
        whole.quantize_(torch.empty(whole.shape, dtype=torch.float32, device=whole.device))
    else:
        _write_bytes(whole, given)


def _fill_piece(whole: QuantizedStorage, own: QuantizedStorage, given: QuantizedStorage | None, values: Tensor) -> None:
    pieces = _PIECES.get(whole)
    if pieces is None or own.place in pieces.places:  # an earlier load stopped half-way
        pieces = _PIECES[whole] = _Pieces()
    pieces.places.append(own.place)
    if given is None and pieces.values is None:
        pieces.values = whole.dequantize(torch.float32)
    if pieces.values is not None:
        _rectangle(pieces.values, whole.place, own.place).copy_(values.reshape(own.shape))
    elif given is not None:
        _write_bytes(whole, given)
    if sum(map(_num_values, pieces.places)) >= _num_values(whole.place):
        del _PIECES[whole]
        if pieces.values is not None:
            _quantize(whole, pieces.values)


def _write_bytes(whole: QuantizedStorage, given: QuantizedStorage) -> None:
    """Of a part of `whole`; what is derived is made anew."""
    canonical = whole.format.canonical
    for each in canonical.fields:
        if all(whole.shape) or each.is_shared(0):
            target, source = (_values(each, storage) for storage in (whole, given))
            _window(each, target, whole.place, given.place).copy_(source)
    whole.copy_(whole.select(*canonical.directions))


def _values(each: Field, storage: QuantizedStorage) -> Tensor:
    return geometry.compact(each, storage.buffers[each.name], storage.region)


def _window(each: Field, wire: Tensor, whole: Any, part: Any) -> Tensor:
    """View of the values of `part` inside of those of `whole`."""
    if isinstance(whole, Group):
        wire = wire.narrow(0, part.members.start - whole.members.start, len(part.members))
        whole, part = whole.region, part.region
    if each.is_shared(0):
        whole = Region(part.rows, whole.cols)  # on shards without rows too
    return geometry.window(each, wire, whole, part)


def _spans(place: Any) -> Iterator[Any]:
    if isinstance(place, Group):
        yield place.members
        place = place.region
    yield from (place.rows, place.cols)


def _num_values(place: Any) -> int:
    return torch.Size(map(len, _spans(place))).numel()


def _rectangle(values: Tensor, whole: Any, part: Any) -> Tensor:
    """View of the values of `part` inside of those of `whole`."""
    for dim, (all_of_it, own) in enumerate(zip(_spans(whole), _spans(part), strict=True)):
        values = values.narrow(dim, own.start - all_of_it.start, len(own))
    return values
