"""Parts that were cut along columns, perhaps along rows as well, put together by DTensor's gather: bytes, as of rows.

[Note: What is gathered along another dimension]
DTensor gathers every dimension along the first, takes the result apart again, and joins the parts where they belong.
What is gathered of columns (of rows of a group) is the whole at once, under the nominal shape of its parts one after
the other: `split` takes those out, and `cat` of all of them gives the whole back.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from te_dist.formats import Field, Region, Span, geometry
from te_dist.tensor import collectives
from te_dist.tensor.cut import Cut
from te_dist.tensor.parts import note, taken_from
from te_dist.tensor.quantized_tensor import QuantizedTensor
from te_dist.tensor.storage import QuantizedStorage
from te_dist.tensor.untyped import TENSOR

ROWS, COLS = 0, 1
_T = TypeVar("_T", bound=QuantizedTensor)
_SECOND = 1  # nominal dimension along which parts are taken out: columns of a matrix, rows of a group
_IN_PARTS: weakref.WeakKeyDictionary[QuantizedStorage, int] = weakref.WeakKeyDictionary()  # how many


def gather(tensor: QuantizedTensor, parts: Sequence[Region], group: ProcessGroup) -> QuantizedTensor:
    """The `parts` that the ranks of `group` hold, joined along the dimension along which these are not alike."""
    own, along_rows = tensor.storage, all(part.cols == parts[0].cols for part in parts)
    if not along_rows:
        check_equal(parts, COLS)
    whole = joined(parts, ROWS if along_rows else COLS)
    storage = QuantizedStorage(own.format, {}, whole, dtype=own.dtype)
    for field in own.format.canonical.fields:
        wires = gathered_wires(field, own.buffers[field.name], parts, group=group)
        storage.buffers[field.name] = geometry.assemble(field, wires, parts, whole)
    if along_rows:
        storage.cut_dims = own.cut_dims - {ROWS}
    else:
        storage.cut_dims, storage.cut = own.cut_dims - {COLS}, _widened(own, whole.cols)
        note_in_parts(storage, len(parts))
    return tensor.like(storage, (len(parts) * tensor.shape[0], *tensor.shape[1:]))


def regions(own: QuantizedStorage, group: ProcessGroup) -> list[Region]:
    """Of every rank's part. A part does not say over which dimension of a mesh it was cut how. Raises as `of_all`."""
    rows, cols = own.region.rows, own.region.cols
    spans = of_all(own, (rows.start, len(rows), cols.start, len(cols)), group)
    return [Region(Span(*each[:2]), Span(*each[2:])) for each in spans]


def of_all(own: QuantizedStorage, numbers: Sequence[int], group: ProcessGroup) -> list[list[int]]:
    """`numbers` of every rank, before parts are gathered.

    Raises:
        RuntimeError: on all ranks, where a part has scales of its own, as after high-precision values were written into
            it.
    """
    mine = torch.tensor([[*numbers, own.unsettled is not None]], device=own.device)
    everyones: list[list[int]] = TENSOR.tolist(collectives.all_gather(mine, group))
    unsettled = [rank for rank, (*_, is_unsettled) in enumerate(everyones) if is_unsettled]
    if unsettled:
        raise RuntimeError(
            f"high-precision values were written into the parts of ranks {unsettled} of {group.size()}, each by its "
            "own scales, which are none of the whole; call te_dist.fsdp2.settle(model) before gathering them"
        )
    return [each for *each, _ in everyones]


def joined(parts: Sequence[Region], dim: int) -> Region:
    """The region of parts that follow each other along `dim`; raises ValueError where they do not."""
    first, place = parts[0], parts[0].origin[dim]
    for part in parts:
        if part.shape[dim] and (part.origin[dim] != place or part.origin[1 - dim] != first.origin[1 - dim]):
            raise ValueError(
                f"the ranks have {list(parts)} of a matrix, which do not follow each other: they were quantized alone, "
                "or cut over other ranks; te_dist.tensor_parallel.gather quantizes parts as the whole"
            )
        place += part.shape[dim]
    span = Span(first.origin[dim], place - first.origin[dim])
    return Region(span, first.cols) if dim == ROWS else Region(first.rows, span)


def _widened(own: QuantizedStorage, cols: Span) -> Cut | None:
    """How rows were cut of what is no part once columns are joined; None where they were not, or over one rank."""
    cut = own.cut
    if cut is None or cut.leaves_all(own.region):
        return None
    return Cut(Region(cut.region.rows, cols), torch.Size((*cut.shape[:-1], len(cols))))


def gathered_wires(field: Field, buffer: Tensor, parts: Sequence[Region], *, group: ProcessGroup) -> list[Tensor]:
    """The wire of `field` of every part, sent as bytes; shorter ones are filled up to the longest.

    Of a group: of equally many members everywhere, whose regions are `parts`.
    """
    leading = buffer.shape[:-2]
    own = geometry.compact(field, buffer, parts[group.rank()]).contiguous().view(-1).view(torch.uint8)
    sizes = [leading.numel() * field.compact_bytes(part) for part in parts]
    sent = functional.pad(own, (0, max(sizes) - own.numel()))
    rows = collectives.all_gather(sent, group).view(group.size(), -1).unbind()
    return [
        row[:size].view(field.dtype).view(*leading, *field.compact_shape(part))
        for row, size, part in zip(rows, sizes, parts, strict=True)
    ]


def check_equal(parts: Sequence[Region], dim: int) -> None:
    """Raises NotImplementedError, on all ranks alike, where parts are of other lengths along `dim`."""
    lengths = [part.shape[dim] for part in parts]
    if len(set(lengths)) > 1:
        raise NotImplementedError(
            f"the ranks have {lengths} {('rows of each member', 'columns')[dim]}, wanted as many on each: DTensor pads "
            "them to be alike, for which codes have no room; cut along the first dimension, or what the ranks divide"
        )


def padded_in_name(tensor: _T, pad: Sequence[int], *, dims: Sequence[int]) -> _T:
    """`tensor` under the shape that DTensor pads it to, behind a part, along `dims` along which it was cut.

    Some ranks pad, others do not: what cannot be gathered of such parts is refused by the gather, on all alike.
    """
    behind = [0] * (tensor.dim() - len(pad) // 2) + list(pad[1::2][::-1])
    if any(pad[::2]) or any(n for dim, n in enumerate(behind) if dim not in dims):
        raise NotImplementedError(
            f"a quantized tensor is padded behind a part only, along what it was cut along, got {list(pad)} for "
            f"{tuple(tensor.shape)}; redistribute to Replicate() first, or call .dequantize()"
        )
    return tensor.like(tensor.storage, [extent + n for extent, n in zip(tensor.shape, behind, strict=True)])


def note_in_parts(whole: QuantizedStorage, number: int) -> None:
    """Remembers that `whole` goes about as so many equal parts, one after the other."""
    _IN_PARTS[whole] = number


def _spans(whole: QuantizedStorage) -> list[tuple[int, int]]:
    """(start, length) of each of the parts that `whole` goes about as."""
    length = whole.shape[_SECOND] // _IN_PARTS[whole]
    return [(number * length, length) for number in range(_IN_PARTS[whole])]


def taken_apart(tensor: _T) -> list[_T] | None:
    """The parts that were gathered as `tensor`; None where it is something else."""
    whole = tensor.storage
    if whole not in _IN_PARTS:
        return None
    parts = (note(whole.narrow(_SECOND, *span), whole) for span in _spans(whole))
    return [tensor.like(part, part.shape) for part in parts]


def whole_of(tensors: Sequence[Any], dim: int) -> QuantizedTensor | None:
    """What was taken apart into just these; None where they are something else."""
    parts = [tensor for tensor in tensors if isinstance(tensor, QuantizedTensor)]
    if not parts or len(parts) < len(tensors) or dim % parts[0].dim() != _SECOND:
        return None
    wholes = [taken_from(part.storage) for part in parts]
    whole = wholes[0]
    if whole is None or whole not in _IN_PARTS or any(each is not whole for each in wholes):
        return None
    if [part.storage.place for part in parts] != [whole.place.narrow(_SECOND, *span) for span in _spans(whole)]:
        return None
    return parts[0].like(whole.map(Tensor.clone), whole.shape)
