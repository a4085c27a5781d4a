"""The bytes of quantized weights that ranks gather: planes in the order of the values, row after row.

[Note: Planes]
A range of the flattened values is a range of bytes in every canonical field that holds a code for each value, if codes
lie in the order of the values. Where the stored tensor does, the plane is the buffer itself. Where it lies transposed
(and cannot be derived), the plane is a tensor beside it, from which `post_all_gather_processing` makes the buffer.
Between writing some of the planes and that call the buffers made of them are not in the storage: a read raises.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from te_dist.formats import Direction, Field, Format, Group, geometry
from te_dist.grouped import GroupedStorage
from te_dist.tensor import QuantizedStorage, QuantizedTensor
from te_dist.tensor.placement import local_tensor

ONE_VALUE = (1, 1)


@dataclass
class _Raw:
    """What belongs to a storage whose bytes are gathered.

    Attributes:
        turned: planes that are not the buffer itself, by field name.
        waiting: buffers taken out of the storage until they are made anew.
        num_writes: of the storage, when planes and buffers held the same values.
    """

    turned: dict[str, Tensor] = field(default_factory=dict)
    waiting: dict[str, Tensor] = field(default_factory=dict)
    num_writes: int = 0


_RAW: WeakKeyDictionary[QuantizedStorage, _Raw] = WeakKeyDictionary()


def raw_data(quantized_tensor: Tensor) -> tuple[Tensor, ...]:
    """The bytes that ranks gather: one plane for most formats, two where columnwise codes cannot be derived.

    Args:
        quantized_tensor: whole on this rank: a matrix, or a group of equal ones.

    Returns:
        Flat uint8 tensors that share memory with the weight, in the order of the values; `raw_range` says where a range
        of values lies in them. What was written into them counts once `post_all_gather_processing` is called.

    Raises:
        ValueError: see `quantize_master_weights`.
    """
    storage = whole_storage(quantized_tensor)
    raw = _raw_of(storage)
    return tuple(_as_bytes(plane_of(storage, raw, each)) for each in plane_fields(storage.format))


def raw_range(quantized_tensor: Tensor, start: int, length: int) -> tuple[tuple[int, int], ...]:
    """(first byte, bytes) of the values `start` to `start + length` of the flattened weight, in each plane.

    Raises:
        ValueError: see `quantize_master_weights`; or the range leaves the weight or is cut inside a byte.
    """
    storage, stop = whole_storage(quantized_tensor), start + length
    rows, cols = storage.members[0].shape if storage.members else (0, 1)
    size = rows * cols * len(storage.members)
    if not 0 <= start <= stop <= size:
        raise ValueError(f"got values {start} to {stop} of a weight of {size}; pass a range of the flattened weight")
    fields = plane_fields(storage.format)
    for at in (start, stop):
        if any(at % cols % each.pack for each in fields):
            raise ValueError(f"value {at} of rows of {cols} lies inside a byte; cut at multiples of two in every row")
    places = [(byte_of(each, cols, start), byte_of(each, cols, stop)) for each in fields]
    return tuple((first, end - first) for first, end in places)


def replace_raw_data(quantized_tensor: Tensor, new_raw_data: Tensor | Sequence[Tensor]) -> None:
    """Moves the bytes that ranks gather into other memory, such as a part of one contiguous buffer of all weights.

    Args:
        quantized_tensor: as of `raw_data`.
        new_raw_data: contiguous, uint8, any shape of as many elements as `raw_data` has; one for each plane.

    Raises:
        ValueError: see `quantize_master_weights`; or the new memory does not fit.
    """
    storage = whole_storage(quantized_tensor)
    raw, fields = _raw_of(storage), plane_fields(storage.format)
    targets = [new_raw_data] if isinstance(new_raw_data, Tensor) else list(new_raw_data)
    if len(targets) != len(fields):
        raise ValueError(
            f"got {len(targets)} tensors for the {len(fields)} planes {[each.name for each in fields]}; pass one for "
            "each, of as many bytes as those of raw_data"
        )
    pairs = [(plane_of(storage, raw, each), target) for each, target in zip(fields, targets, strict=True)]
    moved = [_moved(each, *pair) for each, pair in zip(fields, pairs, strict=True)]
    buffers = dict(storage.buffers)
    for each, (old, _), new in zip(fields, pairs, moved, strict=True):
        new.copy_(old)
        (raw.turned if each.name in raw.turned else buffers)[each.name] = new
    storage.buffers = buffers


def _moved(field: Field, old: Tensor, target: Tensor) -> Tensor:
    """`target` as a plane like `old`."""
    fits = target.dtype == torch.uint8 and target.is_contiguous() and target.device == old.device
    if not fits or target.numel() != old.nbytes or target.storage_offset() % old.element_size():
        raise ValueError(
            f"{field.name}: got {target.dtype} of shape {tuple(target.shape)}, strides {target.stride()} at offset "
            f"{target.storage_offset()} on {target.device}, wanted {old.nbytes} contiguous torch.uint8 on "
            f"{old.device}, at a multiple of {old.element_size()}"
        )
    return target.detach().view(-1).view(old.dtype).view(old.shape)


@torch.no_grad()
def post_all_gather_processing(model_weights: Iterable[Tensor]) -> None:
    """Makes the columnwise buffers of weights from their bytes, after these were gathered or written.

    Args:
        model_weights: as of `raw_data`.

    Raises:
        ValueError: see `quantize_master_weights`.
        RuntimeError: other values were written into a weight after `quantize_master_weights`, or a plane was never
            asked for.
    """
    for weight in model_weights:
        storage = whole_storage(weight)
        raw = _RAW.setdefault(storage, _Raw(num_writes=storage.num_writes))
        if raw.waiting and raw.num_writes != storage.num_writes:
            raise RuntimeError(
                "values were written into a weight between quantize_master_weights and post_all_gather_processing; "
                "call quantize_master_weights again"
            )
        made = {**storage.buffers, **raw.waiting}
        for declared in turned_fields(storage.format) if raw.num_writes == storage.num_writes else ():
            plane = raw.turned.get(declared.name)
            if plane is not None:
                region = storage.members[0].region
                geometry.relayout(in_order(declared), declared, plane, region, made[declared.name])
            elif declared.name in raw.waiting:
                raise RuntimeError(
                    f"{declared.name}: nothing was gathered; gather all planes that raw_data returns, then call "
                    "post_all_gather_processing"
                )
        storage.buffers, raw.waiting = made, {}
        if storage.format.columnwise_is_derivable:
            _derive(storage)


def _derive(storage: QuantizedStorage) -> None:
    """Refreshes the columnwise buffers that are there."""
    row, col = storage.format.rowwise, storage.format.columnwise
    assert row is not None
    assert col is not None
    own = [each for each in col.fields if each.name not in row.names]
    if own and all(each.name in storage.buffers for each in own):
        storage.derive(Direction.COLUMNWISE, {each.name: storage.buffers[each.name] for each in own})


def take_out(storage: QuantizedStorage) -> None:
    """Takes out of a storage what has to be made anew once its planes were gathered. Reads no memory."""
    raw = _RAW.setdefault(storage, _Raw())
    kept = {each.name for each in storage.format.canonical.fields if each not in turned_fields(storage.format)}
    raw.waiting |= {name: buffer for name, buffer in storage.buffers.items() if name not in kept}
    storage.buffers = {name: buffer for name, buffer in storage.buffers.items() if name in kept}
    raw.num_writes = storage.num_writes


def whole_storage(weight: Any) -> QuantizedStorage:
    """The storage of a weight that is whole on this rank.

    Raises:
        ValueError: it is not quantized, or this is a part of it, or lacks a part, or its bytes have no order of values.
    """
    local = local_tensor(weight)
    if not isinstance(local, QuantizedTensor):
        raise ValueError(f"got a {type(weight).__name__}, wanted a quantized tensor; leave plain weights out")
    storage = local.storage
    if storage.cut is not None or storage.cut_dims:
        raise ValueError(
            "got a part of a weight that FSDP2 or tensor parallelism cut, wanted a whole one: others have a say in its "
            "scales; train it by optim.FusedAdam, which agrees with them"
        )
    if isinstance(storage, GroupedStorage) and not isinstance(storage.group, Group):
        raise ValueError("got a group of matrices of different shapes; pass its members one by one")
    sealed = [each.name for each in storage.format.canonical.fields if each.sealed]
    if sealed:
        raise ValueError(f"{sealed} lie in an order private to a kernel; quantize to a format without such fields")
    raw = _RAW.get(storage)
    freed = [name for name in storage.missing if raw is None or name not in raw.waiting]
    if freed:
        raise ValueError(
            f"{freed} are not there, which update_usage freed and nothing else gives; keep both directions of weights "
            "that are trained, or quantize the values into them anew"
        )
    return storage


@lru_cache(maxsize=1024)
def plane_fields(format: Format) -> tuple[Field, ...]:
    """Fields with a code for each value, from which the others of their kind can be made."""
    return tuple(each for each in format.canonical.fields if each.grain == ONE_VALUE)


@lru_cache(maxsize=1024)
def turned_fields(format: Format) -> tuple[Field, ...]:
    """Those of `plane_fields` whose plane is not the buffer itself."""
    return tuple(each for each in plane_fields(format) if each != in_order(each))


@lru_cache(maxsize=1024)
def in_order(declared: Field) -> Field:
    """The same codes in the order of the values."""
    return replace(declared, order="mk", pad=(1, 1))


def byte_of(declared: Field, cols: int, at: int) -> int:
    """Where the value `at` of the flattened weight lies in its plane; rows begin at bytes of their own."""
    row, col = divmod(at, cols)
    return (row * -(-cols // declared.pack) + col // declared.pack) * declared.dtype.itemsize


def plane_of(storage: QuantizedStorage, raw: _Raw, declared: Field) -> Tensor:
    """The plane of a field, in its dtype."""
    plane = raw.turned.get(declared.name)
    return storage.buffers[declared.name] if plane is None else plane


def planes_of(storage: QuantizedStorage) -> list[Tensor]:
    """All planes as flat bytes; what is in them is about to be written."""
    raw = _raw_of(storage)
    return [_as_bytes(plane_of(storage, raw, each)) for each in plane_fields(storage.format)]


def _raw_of(storage: QuantizedStorage) -> _Raw:
    """With planes that hold the values of the storage; of such that wait to be gathered, uninitialised ones."""
    raw = _RAW.setdefault(storage, _Raw())
    for declared in turned_fields(storage.format) if storage.members else ():
        plane, region = raw.turned.get(declared.name), storage.members[0].region
        if raw.waiting:
            if plane is None:
                like = raw.waiting[declared.name]
                plane = geometry.empty(in_order(declared), region, device=like.device, leading=tuple(like.shape[:-2]))
        elif plane is None or raw.num_writes != storage.num_writes:
            buffer = storage.buffers[declared.name]
            plane = geometry.relayout(declared, in_order(declared), buffer, region, plane)
        raw.turned[declared.name] = plane
    if not raw.waiting:
        raw.num_writes = storage.num_writes
    return raw


def _as_bytes(plane: Tensor) -> Tensor:
    return plane.view(-1).view(torch.uint8) if plane.numel() else plane.new_empty(0, dtype=torch.uint8)


def num_values(storage: QuantizedStorage) -> int:
    """Of the flattened weight."""
    return sum(math.prod(member.shape) for member in storage.members)
