"""The aten ops of a GroupedTensor. An op that is not in this table raises with its name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_dist._torch_private import tree_map_only
from te_dist.formats import Group, geometry
from te_dist.formats.group import MEMBERS, ROWS
from te_dist.grouped.grouped_tensor import OPS, GroupedTensor
from te_dist.grouped.storage import GroupCut, GroupedStorage, empty
from te_dist.tensor import OPS as OF_MATRICES
from te_dist.tensor import QuantizedTensor, aten_values, rectangles
from te_dist.tensor.aten import SLICE, outline
from te_dist.tensor.filling import fill
from te_dist.tensor.parts import check_writable, is_same_part, note, note_alike
from te_dist.tensor.quantized_tensor import mode_of

aten = torch.ops.aten

# Handlers that work on a storage as a whole, whatever it holds.
OPS.adopt(
    OF_MATRICES,
    *(aten.detach.default, aten.detach_.default, aten.alias.default, aten.view.default, aten._unsafe_view.default),
    *(aten._reshape_alias.default, aten.as_strided.default, aten.clone.default, aten._pin_memory.default),
    *(aten._to_copy.default, aten.record_stream.default, aten.is_pinned.default),
    *(aten.expand.default, aten.narrow.default, aten.chunk.default, *aten_values.overloads(aten_values.READING)),
    *aten_values.overloads(aten_values.COMPARING),
    *aten_values.overloads(aten_values.FRESH),
    *aten_values.overloads(aten_values.AVERAGING),
)


@OPS.implements(aten.unbind.int)
def _unbind(func: Any, args: Any, kwargs: Any) -> list[QuantizedTensor]:
    """The members, as views."""
    tensor: GroupedTensor = args[0]
    _check_members(tensor, "unbind", kwargs.get("dim", args[1] if len(args) > 1 else 0))
    return list(tensor.members)


@OPS.implements(aten.select.int)
def _select(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """One member, as a view."""
    tensor, dim, index = args
    outline(func, args, kwargs)
    _check_members(tensor, "select", dim)
    with mode_of(tensor):
        return QuantizedTensor(tensor.storage.view(index))


def _check_members(tensor: GroupedTensor, op: str, dim: int) -> None:
    if tensor.shape != tensor.storage.shape or tensor.dim() != 3 or dim % 3 != MEMBERS:
        raise NotImplementedError(
            f"{op} takes members of a group out of dimension 0 of (members, rows, cols), got dim {dim} of "
            f"{tuple(tensor.shape)}; use .members, or .dequantize() first"
        )


@OPS.implements(aten.empty_like.default)
def _empty_like(func: Any, args: Any, kwargs: Any) -> GroupedTensor:
    """Uninitialised buffers of the same fields, group and cut."""
    tensor, old = args[0], args[0].storage
    device, dtype = kwargs.get("device") or tensor.device, kwargs.get("dtype") or tensor.dtype
    storage = empty(old.format, old.group, dtype=dtype, device=device, fields=old.fields)
    storage.cut, storage.cut_dims = old.cut, old.cut_dims
    note_alike(storage, old)
    return tensor.like(storage, tensor.shape)


@OPS.implements(aten.new_zeros.default, aten.new_empty.default)
def _new(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A part along members or rows: a blank of that size, which becomes what is first copied into it. Else plain."""
    tensor, size = args[0], torch.Size(args[1])
    is_scratch = func is aten.new_empty.default and size.numel() > 0
    differing = [dim for dim, (a, b) in enumerate(zip(size, tensor.shape, strict=False)) if a != b]
    is_part = isinstance(tensor.group, Group) and len(size) == tensor.dim() == 3 and differing in ([], [0], [1])
    if is_part and kwargs.get("dtype") in (None, tensor.dtype) and not is_scratch:
        return tensor.like(_blank(tensor, differing[0] if differing else MEMBERS, size), size)
    return func(torch.empty(0, dtype=tensor.dtype, device=tensor.device), size, **kwargs)


def _blank(tensor: GroupedTensor, dim: int, size: torch.Size) -> GroupedStorage:
    """The empty shard at the end of `tensor`: what a rank holds that gets nothing."""
    old = tensor.storage
    blank = old.narrow(dim, old.shape[dim], 0)
    being_cut = size[dim] < tensor.shape[dim] or old.cut is None
    blank.cut = _cut_of(tensor, dim) if being_cut else old.cut
    return blank


def _cut_of(tensor: GroupedTensor, dim: int) -> GroupCut:
    return GroupCut(tensor.storage.uniform, dim, tensor.shape, bool(tensor.storage.cut_dims))


def _is_blank(tensor: GroupedTensor) -> bool:
    return tensor.numel() != torch.Size(tensor.storage.shape).numel()


@OPS.implements(aten.slice.Tensor)
def _slice(func: Any, args: Any, kwargs: Any) -> GroupedTensor:
    """Whole members, or rows or columns of each, with buffers of their own; the whole range is a view."""
    tensor, dim, start, end, step = (*args, *SLICE[len(args) - 1 :])
    dim = dim % tensor.dim()
    start, end, _ = slice(start, end).indices(tensor.shape[dim])
    if step == 1 and end - start == tensor.shape[dim]:
        return tensor.like(tensor.storage, tensor.shape)
    shape = [max(end - start, 0) if d == dim else n for d, n in enumerate(tensor.shape)]
    if _is_blank(tensor) and start == 0:
        return tensor.like(tensor.storage, shape)
    return tensor.like(_part(tensor, dim, start, shape[dim], step), shape)


def _part(tensor: GroupedTensor, dim: int, start: int, length: int, step: int = 1) -> GroupedStorage:
    if step != 1 or tensor.shape != tensor.storage.shape or tensor.dim() != 3:
        raise NotImplementedError(
            f"a grouped tensor is cut as (members, rows, cols) and without gaps, got dim {dim} of "
            f"{tuple(tensor.shape)} with step {step}; call .dequantize() first"
        )
    return note(tensor.storage.narrow(dim, start, length), tensor.storage)


@OPS.implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, args: Any, kwargs: Any) -> list[GroupedTensor]:
    """Parts with buffers of their own; those along members and rows know what they were cut from."""
    tensor: GroupedTensor = args[0]
    dim = kwargs.get("dim", (*args, 0)[2])
    sizes = [each.shape[dim] for each in outline(func, args, kwargs)]
    if (rows := rectangles.taken_apart(tensor)) is not None:
        return rows
    dim = dim % tensor.dim()
    parts: list[GroupedTensor] = []
    start = 0
    for length in sizes:
        storage = _part(tensor, dim, start, length)
        storage.cut = _cut_of(tensor, dim) if dim in (MEMBERS, ROWS) else None
        parts.append(tensor.like(storage, [length if d == dim else n for d, n in enumerate(tensor.shape)]))
        start += length
    return parts


@OPS.implements(aten.copy_.default)
def _copy_(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Same format and group: bytes. Otherwise the values: quantized into a group, dequantized from one."""
    dst, src = args[:2]
    non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
    if not isinstance(dst, GroupedTensor):
        return dst.copy_(src.decoded(), non_blocking=non_blocking)
    if fill(dst, src):
        return dst
    check_writable(dst)
    if not isinstance(src, QuantizedTensor):
        dst.quantize_(src.to(dst.device).expand(dst.shape))
    elif not isinstance(src, GroupedTensor) or src.format != dst.format:
        dst.quantize_(src.decoded().to(dst.device).expand(dst.shape))
    elif _is_blank(dst):
        dst.storage.adopt(src.storage)
    elif src.shape == dst.shape and _holds_bytes_of(src.storage, dst.storage):
        dst.storage.copy_(src.storage, non_blocking=non_blocking)
    else:
        dst.quantize_(src.decoded().to(dst.device).expand(dst.shape))
    return dst


def _holds_bytes_of(src: GroupedStorage, dst: GroupedStorage) -> bool:
    """Whether the bytes of `src` can be those of `dst`, of the same format; the same answer on all ranks."""
    if not (isinstance(src.group, Group) and isinstance(dst.group, Group)):
        return src.group == dst.group
    if src.shape != dst.shape:
        return False
    if dst.may_share_scales():
        return is_same_part(src, dst)
    return all(src.region.phase(f.tile) == dst.region.phase(f.tile) for f in src.format.fields)


@OPS.implements(aten.equal.default)
def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    """Two of one format: whether all unpadded bytes are equal. Otherwise whether the values are."""
    a, b = args
    if not (isinstance(a, GroupedTensor) and isinstance(b, GroupedTensor) and a.format == b.format):
        return torch.equal(*tree_map_only(QuantizedTensor, QuantizedTensor.dequantize, (a, b)))
    if a.shape != b.shape or a.group != b.group:
        return False
    if not set(a.storage.directions) & set(b.storage.directions):
        return torch.equal(a.decoded(), b.decoded())
    names = [f for f in a.storage.fields if f.name in b.storage.buffers]
    return all(
        torch.equal(*(geometry.compact(f, member.buffers[f.name], member.region) for member in pair))
        for pair in zip(a.storage.members, b.storage.members, strict=True)
        for f in names
    )


@OPS.implements(*aten_values.overloads(aten_values.WRITING), *aten_values.overloads(aten_values.WRITING_LISTS))
def _write(func: Any, args: Any, kwargs: Any) -> Any:
    """In high precision; what the schema says is written is quantized back into place, each member on its own."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    aten_values.warn_of_sum(func, *given.values())
    plain = tree_map_only(QuantizedTensor, QuantizedTensor.dequantize, given)
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    plain |= {name: tree_map_only(QuantizedTensor, aten_values.written, given[name]) for name in written}
    func(**plain)
    for name in written:
        tree_map_only(QuantizedTensor, check_writable, given[name])
        _write_back(given[name], plain[name], begins=func in aten_values.FILLING_OPS)
    return given[written[0]] if func._schema.returns else None


@OPS.implements(*aten_values.overloads(aten_values.WRITING_KEPT))
def _write_kept(func: Any, args: Any, kwargs: Any) -> Any:
    """In high precision, the result quantized back into place; of values that are kept as they were quantized alone."""
    aten_values.check_kept(func, args[0])
    return _write(func, args, kwargs)


def _write_back(target: Any, value: Any, *, begins: bool) -> None:
    if isinstance(target, list | tuple):
        for each, values in zip(target, value, strict=True):
            _write_back(each, values, begins=begins)
    elif isinstance(target, QuantizedTensor):
        aten_values.write_back(target, value, begins=begins)
    elif target is not value:
        target.copy_(value)
