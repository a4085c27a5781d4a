"""The aten ops of a QuantizedTensor that move bytes: they work on buffers, by the format's declaration.

`tensor.aten_values` has the others, which go through the values. An op in neither raises with its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_dist._torch_private import tree_map_only
from te_dist.formats import geometry
from te_dist.ops._checks import HIGH_PRECISION
from te_dist.tensor import rectangles
from te_dist.tensor.cut import Cut
from te_dist.tensor.filling import fill
from te_dist.tensor.parts import check_writable, is_same_part, note, note_alike
from te_dist.tensor.quantized_tensor import OPS, QuantizedTensor
from te_dist.tensor.storage import QuantizedStorage, empty

aten = torch.ops.aten

SLICE: tuple[Any, ...] = (0, None, None, 1)  # dim, start, end and step that are not given


@OPS.implements(aten.detach_.default)
def _itself(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """The tensor, which has no graph here."""
    return args[0]


@OPS.implements(aten.detach.default, aten.alias.default)
def _alias(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """Another view of the same storage."""
    return args[0].like(args[0].storage, args[0].shape)


def outline(func: Any, args: Any, kwargs: Any) -> Any:
    """What an op gives of a plain tensor of this shape, without values; raises as it does."""
    return func(torch.empty(args[0].shape, device="meta"), *args[1:], **kwargs)


@OPS.implements(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
def _view(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """Another nominal shape of the same storage; buffers describe the matrix and are left alone."""
    tensor, size = args[:2]
    shape = tensor.shape
    if tuple(size) != shape:
        shape = torch.empty(shape, device="meta").view(size).shape
    return tensor.like(tensor.storage, shape)


@OPS.implements(aten.squeeze.dim, aten.unsqueeze.default)
def _same_matrix_view(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """Another nominal shape of the same storage."""
    return args[0].like(args[0].storage, func(torch.empty(args[0].shape, device="meta"), *args[1:]).shape)


@OPS.implements(aten.expand.default)
def _expand(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """More dimensions of one in front: another nominal shape of the same storage. Nothing is repeated."""
    tensor, shape = args[0], func(torch.empty(args[0].shape, device="meta"), *args[1:], **kwargs).shape
    if shape.numel() != tensor.numel():
        raise NotImplementedError(
            f"a quantized tensor of {tuple(tensor.shape)} is not repeated, got expand to {tuple(shape)}; call "
            ".dequantize() first"
        )
    return tensor.like(tensor.storage, shape)


@OPS.implements(aten.as_strided.default)
def _as_strided(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """The identity only: same size, contiguous strides, no offset."""
    tensor, size, stride = args[:3]
    offset = args[3] if len(args) > 3 else None
    moving = [(s, t) for n, s, t in zip(size, stride, tensor.stride(), strict=False) if n > 1]
    if tuple(size) != tuple(tensor.shape) or any(s != t for s, t in moving) or offset:
        raise NotImplementedError(
            f"as_strided of a quantized tensor is the identity only: got size {tuple(size)}, stride {tuple(stride)} "
            f"of {tuple(tensor.shape)}; use view, slice or dequantize()"
        )
    return tensor.like(tensor.storage, tensor.shape)


@OPS.implements(aten.clone.default, aten._pin_memory.default)
def _each_buffer(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """The same op on every buffer: nothing is shared with the original."""
    tensor: QuantizedTensor = args[0]
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    return tensor.like(tensor.storage.map(lambda b: func(b, *args[1:], **kwargs)), tensor.shape)


@OPS.implements(aten._to_copy.default)
def _to_copy(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """Another device: every buffer moves. Another of float32, bfloat16 and float16: only the nominal dtype changes."""
    tensor: QuantizedTensor = args[0]
    dtype, device = kwargs.get("dtype") or tensor.dtype, kwargs.get("device")
    if dtype not in HIGH_PRECISION:
        raise NotImplementedError(
            f"a quantized tensor stands for values of float32, bfloat16 or float16, got dtype {dtype}; call "
            f".dequantize().to({dtype})"
        )
    non_blocking = kwargs.get("non_blocking", False)
    storage = tensor.storage.map(lambda b: b.to(device=device, non_blocking=non_blocking, copy=True))
    storage.dtype = dtype
    return tensor.like(storage, tensor.shape)


@OPS.implements(aten.record_stream.default)
def _record_stream(func: Any, args: Any, kwargs: Any) -> None:
    """The same op on every buffer."""
    for buffer in args[0].storage.buffers.values():
        func(buffer, args[1])


@OPS.implements(aten.is_pinned.default)
def _is_pinned(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether every buffer is pinned."""
    return all(buffer.is_pinned() for buffer in args[0].storage.buffers.values())


@OPS.implements(aten.empty_like.default)
def _empty_like(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """Uninitialised buffers of the same fields, region and cut."""
    tensor, old = args[0], args[0].storage
    device, dtype = kwargs.get("device") or tensor.device, kwargs.get("dtype") or tensor.dtype
    storage = empty(old.format, old.region, dtype=dtype, device=device, fields=old.fields)
    storage.cut, storage.cut_dims = old.cut, old.cut_dims
    note_alike(storage, old)
    out = tensor.like(storage, tensor.shape)
    out.keep_initial |= old.is_of_kept_group
    return out


@OPS.implements(aten.new_zeros.default, aten.new_empty.default)
def _new(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Rows like this tensor's: a blank of that size, which becomes what is first copied into it. Else a plain tensor.

    `new_empty` of rows is plain too: it is asked for as scratch space (by initializers), `new_zeros` as a shard. No
    columns at all are a shard as well.
    """
    tensor, size = args[0], torch.Size(args[1])
    is_scratch = func is aten.new_empty.default and size.numel() > 0
    if kwargs.get("dtype") in (None, tensor.dtype) and not is_scratch:
        if size[1:] == tensor.shape[1:]:
            return tensor.like(_blank(tensor, size), size)
        if size == (*tensor.shape[:-1], 0):
            return tensor.like(tensor.storage.narrow(1, tensor.storage.shape[1], 0), size)
    return func(torch.empty(0, dtype=tensor.dtype, device=tensor.device), size, **kwargs)


def _blank(tensor: QuantizedTensor, size: torch.Size) -> QuantizedStorage:
    """The empty row shard at the end of `tensor`: what a rank holds that gets no rows."""
    old = tensor.storage
    blank = old.narrow(0, old.shape[0], 0)
    being_cut = size[0] < tensor.shape[0] or old.cut is None
    blank.cut = Cut(old.region, tensor.shape, bool(old.cut_dims)) if being_cut else old.cut
    return blank


def _is_blank(tensor: QuantizedTensor) -> bool:
    return tensor.numel() != tensor.storage.shape[0] * tensor.storage.shape[1]


@OPS.implements(aten.slice.Tensor)
def _slice(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """A part along the first or last dimension, with buffers of its own; the whole range is a view."""
    tensor, dim, start, end, step = (*args, *SLICE[len(args) - 1 :])
    dim = dim % tensor.dim()
    start, end, _ = slice(start, end).indices(tensor.shape[dim])
    if step == 1 and end - start == tensor.shape[dim]:
        return tensor.like(tensor.storage, tensor.shape)
    shape = [max(end - start, 0) if d == dim else n for d, n in enumerate(tensor.shape)]
    if _is_blank(tensor) and dim == 0 and start == 0:
        return tensor.like(tensor.storage, shape)
    return tensor.like(_part(tensor, dim, start, shape[dim], step), shape)


@OPS.implements(aten.narrow.default)
def _narrow(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """As slice: in inference mode torch does not take it apart."""
    outline(func, args, kwargs)
    tensor, dim, start, length = args
    start = start % tensor.shape[dim] if start < 0 else start
    return aten.slice.Tensor(tensor, dim, start, start + length)


def _part(tensor: QuantizedTensor, dim: int, start: int, length: int, step: int = 1) -> QuantizedStorage:
    columns = dim == tensor.dim() - 1 and tensor.shape[-1] == tensor.storage.shape[1]
    if step != 1 or (not columns and dim != 0):
        raise NotImplementedError(
            f"a quantized tensor is cut along its first or last dimension, got dim {dim} of {tuple(tensor.shape)} "
            f"with step {step}; call .dequantize() first"
        )
    if columns:
        return note(tensor.storage.narrow(1, start, length), tensor.storage)
    unit, rest = divmod(tensor.storage.shape[0], tensor.shape[0])
    if rest:
        raise NotImplementedError(
            f"rows of a view of {tuple(tensor.shape)} are none of the quantized matrix, which has "
            f"{tuple(tensor.storage.shape)}; view it as it is, or call .dequantize() first"
        )
    return note(tensor.storage.narrow(0, start * unit, length * unit), tensor.storage)


@OPS.implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, args: Any, kwargs: Any) -> list[QuantizedTensor]:
    """Parts with buffers of their own; row parts know what they were cut from."""
    tensor: QuantizedTensor = args[0]
    dim = kwargs.get("dim", (*args, 0)[2])
    sizes = [each.shape[dim] for each in outline(func, args, kwargs)]
    if (columns := rectangles.taken_apart(tensor)) is not None:
        return columns
    dim = dim % tensor.dim()
    parts: list[QuantizedTensor] = []
    start = 0
    for length in sizes:
        storage = _part(tensor, dim, start, length)
        storage.cut = Cut(tensor.storage.region, tensor.shape, bool(tensor.storage.cut_dims)) if dim == 0 else None
        shape = [length if d == dim else n for d, n in enumerate(tensor.shape)]
        parts.append(tensor.like(storage, shape))
        start += length
    return parts


@OPS.implements(aten.chunk.default)
def _chunk(func: Any, args: Any, kwargs: Any) -> list[QuantizedTensor]:
    """As split: below autograd torch does not take it apart."""
    tensor, _, dim = (*args, kwargs.get("dim", 0))[:3]
    return aten.split_with_sizes.default(tensor, [each.shape[dim] for each in outline(func, args, kwargs)], dim)


@OPS.implements(aten.constant_pad_nd.default)
def _pad(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """Rows, or columns, behind those of a shard, by which DTensor makes all shards equally long; in name only."""
    tensor, pad = args[:2]
    own = tensor.storage
    rows = [0] if own.cut is not None or rectangles.ROWS in own.cut_dims else []
    columns = [tensor.dim() - 1] if rectangles.COLS in own.cut_dims else []
    return rectangles.padded_in_name(tensor, pad, dims=rows + columns)


@OPS.implements(aten.select.int)
def _select(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """One member of a stacked tensor, with buffers of its own."""
    tensor, dim, index = args
    outline(func, args, kwargs)
    _check_members(tensor, "select", dim)
    return tensor.like(_part(tensor, 0, index % tensor.shape[0], 1), tensor.shape[1:])


@OPS.implements(aten.unbind.int)
def _unbind(func: Any, args: Any, kwargs: Any) -> list[QuantizedTensor]:
    """The members of a stacked tensor, with buffers of their own."""
    tensor: QuantizedTensor = args[0]
    _check_members(tensor, "unbind", kwargs.get("dim", args[1] if len(args) > 1 else 0))
    return [tensor.like(_part(tensor, 0, index, 1), tensor.shape[1:]) for index in range(tensor.shape[0])]


def _check_members(tensor: QuantizedTensor, op: str, dim: int) -> None:
    if tensor.dim() < 3:
        raise NotImplementedError(
            f"{op} of a quantized tensor of {tuple(tensor.shape)}: got a row, column or element alone, which shares "
            "scales with others, wanted a slice of rows, or members of a stack; call .dequantize() first"
        )
    if dim % tensor.dim() != 0:
        raise NotImplementedError(
            f"{op} takes members of a stacked quantized tensor (dim 0 of three or more), got dim {dim} of "
            f"{tuple(tensor.shape)}; call .dequantize() first"
        )


@OPS.implements(aten.copy_.default)
def _copy_(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Same format and region: bytes. Otherwise the values: quantized into a quantized target, dequantized from one."""
    dst, src = args[:2]
    non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
    if not isinstance(dst, QuantizedTensor):
        return dst.copy_(src.decoded(), non_blocking=non_blocking)
    if fill(dst, src):
        return dst
    check_writable(dst)
    if not isinstance(src, QuantizedTensor):
        dst.quantize_(src.to(dst.device).expand(dst.shape))
    elif src.format == dst.format and _is_blank(dst):
        dst.storage.adopt(src.storage)
    elif src.format == dst.format and src.shape == dst.shape and _holds_bytes_of(src.storage, dst.storage):
        dst.storage.copy_(src.storage, non_blocking=non_blocking)
    else:
        dst.quantize_(src.decoded().to(dst.device).expand(dst.shape))
    return dst


def _holds_bytes_of(src: QuantizedStorage, dst: QuantizedStorage) -> bool:
    """Whether the bytes of `src` can be those of `dst`, of the same format; the same answer on all ranks.

    Both regions have to meet their tiles alike. A part that shares scales with others takes the bytes of the same part
    only: those of a matrix that was quantized alone would leave every rank with a scale of its own.
    """
    if dst.may_share_scales():
        return is_same_part(src, dst)
    same_tiles = all(src.region.phase(f.tile) == dst.region.phase(f.tile) for f in src.format.fields)
    return src.shape == dst.shape and same_tiles


@OPS.implements(aten.equal.default)
def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    """Two of one format: whether all unpadded bytes are equal. Otherwise whether the values are."""
    a, b = args
    if not (isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor) and a.format == b.format):
        return torch.equal(*tree_map_only(QuantizedTensor, QuantizedTensor.dequantize, (a, b)))
    if a.shape != b.shape or a.storage.region != b.storage.region:
        return False
    if not set(a.storage.directions) & set(b.storage.directions):
        return torch.equal(a.decoded(), b.decoded())
    common = [f for f in a.storage.fields if f.name in b.storage.buffers]
    wires = [[geometry.compact(f, t.storage.buffers[f.name], t.storage.region) for f in common] for t in (a, b)]
    return all(torch.equal(x, y) for x, y in zip(*wires, strict=True))
