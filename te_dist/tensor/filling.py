"""What torch.distributed.checkpoint asks of the tensors that it saves and fills.

A quantized tensor is saved as it is: each rank's shard with its region. Where shards are cut in another way than those
saved, DCP fills them piece by piece, through slices that it takes for views. What it is handed out writes through:
bytes of the same place in the same format are taken over as they are, scales of tiles that a cut goes through among
them, since all pieces were cut from one matrix. Other values (of a plain checkpoint) are put together and quantized
once all are there. So is what was quantized (`storage.initial`), where each piece brings its own.

Plain values that are copied into a whole tensor come here too, where it keeps what it is quantized from: torch loads by
`copy_` as well, into parameters that it was not given by a state dict.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from te_dist.formats import Field, Group, Region, geometry
from te_dist.tensor import placement
from te_dist.tensor.cut import Cut
from te_dist.tensor.parts import before_writing, check_writable, filled_as, filled_by, note_filled
from te_dist.tensor.storage import QuantizedStorage, empty


@dataclass
class _Pieces:
    """What of a storage was filled under one name of a checkpoint.

    Attributes:
        places: of the pieces that were given.
        values: (as the storage), fp32, of all pieces; None as long as all of them were bytes.
        initial: (as the storage) on the CPU, what all pieces were quantized from; None where one of them does not tell.
    """

    places: list[Any] = field(default_factory=list[Any])
    values: Tensor | None = None
    initial: Tensor | None = None


class _Given(NamedTuple):
    """What is written into a place.

    Attributes:
        values: (of the place), floating-point.
        bytes: of the same place in the same format; None where there are values only.
        initial: what is kept as that which was quantized; None where nothing is.
    """

    values: Tensor
    bytes: QuantizedStorage | None
    initial: Tensor | None


# By name: weights that modules share are filled once under each of their names, and in turns.
_PIECES: weakref.WeakKeyDictionary[QuantizedStorage, dict[str, _Pieces]] = weakref.WeakKeyDictionary()


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


def chunk_to_read(local: Tensor) -> ChunkStorageMetadata | None:
    """As `chunk_of_rest`; torch asks so once for each load, before it reads: what an earlier one left is forgotten."""
    _PIECES.pop(storage_of(local), None)
    return chunk_of_rest(local)


def to_fill(local: Tensor, name: str) -> tuple[QuantizedStorage, torch.Size]:
    """A storage and the nominal shape of what was said to be read: what is copied into it, or into parts of it, is
    written into the shard. `name`: in the checkpoint."""
    storage: QuantizedStorage = storage_of(local)
    chunk = chunk_of_rest(local)
    if chunk is None:
        return note_filled(storage.map(lambda buffer: buffer), storage, name), local.shape
    blank = empty(storage.format, storage.cut.region, dtype=storage.dtype, device=storage.device)  # type: ignore[union-attr]
    return note_filled(blank, storage, name), chunk.sizes


def storage_of(tensor: Any) -> Any:
    """The storage of a quantized tensor; None of a plain one."""
    storage = getattr(tensor, "storage", None)
    return storage if isinstance(storage, QuantizedStorage) else None


def fill(target: Any, source: Any) -> bool:
    """Writes what is copied into a part of a shard that is filled, and plain values into what keeps them. False where
    `target` is no such part and has nothing to keep."""
    own, given = storage_of(target), storage_of(source)
    whole = filled_by(own)
    if whole is None:
        loads = target.keep_initial and given is None
        if loads:
            check_writable(target)
            if target.storage.initial is not None:
                _warn_of_decoded(target, source)
            load_values(target, source)
        return loads
    before_writing(whole)
    alike = given if given is not None and given.format == whole.format and given.place == own.place else None
    if alike is not None and own.place == whole.place:
        _PIECES.pop(whole, None)
        whole.copy_(alike)
    elif not all(whole.shape):
        _fill_shared(whole, alike)
    elif own.place == whole.place:
        _PIECES.pop(whole, None)
        load_values(target, source, into=whole)
    else:
        _fill_piece(whole, own, _given(target, source, has_bytes=alike is not None))
    return True


def _warn_of_decoded(target: Any, source: Tensor) -> None:
    """Where `target` keeps what it was quantized from, and gets what its codes stand for instead."""
    values = source.detach().to(target.device, target.dtype)
    if values.shape != target.shape or not torch.equal(values, target.dequantize()):
        return
    if not torch.equal(values, target.storage.initial.to(target.device, target.dtype).view(target.shape)):
        warnings.warn(  # without the shape: texts that differ are printed again
            "a weight that keeps what it was quantized from is written with what its codes stand for, which is what "
            "masters of an optimizer begin with from now on. DistributedDataParallel does so where it wraps: make "
            "models alike on all ranks and pass init_sync=False",
            stacklevel=4,
        )


def load_values(target: Any, source: Tensor, *, into: QuantizedStorage | None = None) -> None:
    """Quantizes values, which are kept where `target` keeps what it is quantized from.

    Args:
        target: quantized.
        source: of its shape, or of one that expands to it; quantized values are decoded.
        into: the storage that is written, where it is not that of `target`.
    """
    storage, given = into or target.storage, _given(target, source, has_bytes=False)
    before_writing(storage)
    storage.quantize_(given.values.to(storage.device))
    if given.initial is not None:
        storage.note_initial(given.initial)


def _given(target: Any, source: Any, *, has_bytes: bool) -> _Given:
    """NOTE: what is kept has to be so on all ranks or on none, or a matrix begins half with values, half with codes.

    It depends on what is the same everywhere: on what kind the source is, whether the target keeps values, and whether
    the shards that were saved had theirs, of which every piece has a part.
    """
    storage = storage_of(source)
    values = (source if storage is None else source.dequantize()).detach().expand(target.shape)
    if storage is None:
        return _Given(values, None, values if target.keep_initial else None)
    return _Given(values, storage, storage.initial) if has_bytes else _Given(values, None, None)


def _fill_shared(whole: QuantizedStorage, given: QuantizedStorage | None) -> None:
    """Of a shard without rows: the values that all shards hold; or that scales are still to be agreed on."""
    if given is None:
        whole.quantize_(torch.empty(whole.shape, dtype=torch.float32, device=whole.device))
    else:
        _write_bytes(whole, given)


def _fill_piece(whole: QuantizedStorage, own: QuantizedStorage, given: _Given) -> None:
    named, name = _PIECES.setdefault(whole, {}), filled_as(own)
    pieces = named.get(name)
    if pieces is None or any(_overlap(own.place, place) for place in pieces.places):  # an earlier load stopped half-way
        pieces = named[name] = _Pieces()
        if given.initial is not None:
            pieces.initial = torch.empty(whole.shape, dtype=given.initial.dtype)
    pieces.places.append(own.place)
    if given.initial is None:
        pieces.initial = None
    elif pieces.initial is not None:
        _rectangle(pieces.initial, whole.place, own.place).copy_(given.initial.reshape(own.shape))
    if given.bytes is None and pieces.values is None:
        pieces.values = whole.dequantize(torch.float32)
    if pieces.values is not None:
        _rectangle(pieces.values, whole.place, own.place).copy_(given.values.reshape(own.shape))
    elif given.bytes is not None:
        _write_bytes(whole, given.bytes)
    if sum(map(_num_values, pieces.places)) >= _num_values(whole.place):
        _finish(whole, named.pop(name))


def _finish(whole: QuantizedStorage, pieces: _Pieces) -> None:
    """Once all pieces are there."""
    if pieces.values is not None:
        whole.quantize_(pieces.values)
    whole.initial = pieces.initial


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


def _overlap(a: Any, b: Any) -> bool:
    return all(max(x.start, y.start) < min(x.stop, y.stop) for x, y in zip(_spans(a), _spans(b), strict=True))


def _num_values(place: Any) -> int:
    return torch.Size(map(len, _spans(place))).numel()


def _rectangle(values: Tensor, whole: Any, part: Any) -> Tensor:
    """View of the values of `part` inside of those of `whole`."""
    for dim, (all_of_it, own) in enumerate(zip(_spans(whole), _spans(part), strict=True)):
        values = values.narrow(dim, own.start - all_of_it.start, len(own))
    return values
