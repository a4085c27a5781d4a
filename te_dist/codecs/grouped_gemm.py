"""Which functions multiply rows in groups, by pair of encodings: one table, without a default.

Every group of rows has a matrix of its own, a member of a stack (G, N, K):

    forward  y  (T, N) = x  (T, K) . weight (G, N, K)     rows
    dgrad    dx (T, K) = dy (T, N) . weight (G, N, K)     rows
    wgrad    dw (G, N, K) = dy (T, N) . x (T, K)          sums over the rows of each group

[Note: What products in groups wait for]
Nothing: where groups begin is read on the device, from a group table, and all that is allocated follows from T, K and
G. The exception is fp32, which has no kernel for groups: its products are torch's, one for each group, whose sizes the
host has to know. On a GPU that is one wait for the device in every product, and capture in a graph is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_dist import ops
from te_dist.codecs.base import Codec, KnownEncoding
from te_dist.codecs.block import Block
from te_dist.codecs.decoded import coded
from te_dist.codecs.gemm import Operand, check_transforms
from te_dist.codecs.high_precision import HighPrecision
from te_dist.codecs.mxfp8 import MxFp8
from te_dist.codecs.nvfp4 import NvFp4
from te_dist.codecs.tensorwise import Tensorwise
from te_dist.formats import Encoding, Field, Region
from te_dist.formats.field import Numerics
from te_dist.formats.region import Pair
from te_dist.kernels.gemm_staged import STEP
from te_dist.kernels.grouped_gemm import is_turned_sooner
from te_dist.kernels.runtime import target_of
from te_dist.ops.gemm_decoded import Coded
from te_dist.ops.group_table import TILE

HALVES = (torch.bfloat16, torch.float16)


class Rows(NamedTuple):
    """Rows in groups, in the direction that a product reads.

    Attributes:
        encoding, stored: what is read, laid out as `tensor.GroupedRows` says; what is one value for a matrix may be one
            for each group, or one for all.
        region: of the matrix that `stored` describes; of padded rows where the product sums over them.
        sums_over: 1 for products of rows, 0 for sums over the rows of groups.
    """

    encoding: KnownEncoding
    stored: tuple[Tensor, ...]
    region: Region
    sums_over: int


class Members(NamedTuple):
    """A matrix of each group.

    Attributes:
        encoding: of each.
        stored: of each field (G, *field.shape(region)), contiguous.
        region: of one member, (N, K).
        sums_over: dimension (0: N, 1: K) that the product sums over; codes lie along it, but see `reads_as_they_lie`.
    """

    encoding: KnownEncoding
    stored: tuple[Tensor, ...]
    region: Region
    sums_over: int

    @property
    def extents(self) -> Pair:
        """(kept, summed)."""
        rows, cols = self.region.shape
        return (rows, cols) if self.sums_over == 1 else (cols, rows)


class Result(NamedTuple):
    """Where products of rows go.

    Attributes:
        table: int32 (4, G + 1), see `ops.group_table`.
        bias: (G, kept of b), added before rounding; None for none.
        accumulate: add to what `out`, fp32, holds.
        out: (T, kept of b); rows behind the last group are left as they are.
    """

    table: Tensor
    bias: Tensor | None
    accumulate: bool
    out: Tensor


class SumsResult(NamedTuple):
    """Where sums go, as `Result`: `out` (G, columns of a, columns of b). Not added, those of empty groups are zeros."""

    table: Tensor
    accumulate: bool
    out: Tensor


class Entry(NamedTuple):
    """Two functions of the table: products of rows, and sums over the rows of groups, if there are any.

    Attributes:
        multiple: extents of a member are multiples of this.
    """

    rows: Callable[[Rows, Members, Result], None]
    sums: Callable[[Rows, Rows, SumsResult], None] | None
    multiple: int


_TARGETS = "cpu", "sm_90a"
_TABLE: dict[tuple[type[Numerics], type[Numerics], str], Entry] = {}  # by codecs and target, see `target_of`


def multiply_rows(a: Rows, b: Members, result: Result) -> Tensor:
    """Writes a[rows of g] b[g]^T for every group g; returns `result.out`.

    Raises:
        NotImplementedError: no function multiplies these two encodings on this device.
        ValueError: operands that do not fit each other, or extents that the function does not take.
    """
    entry = find(a.encoding, b.encoding, target_of(result.out.device))
    summed, (kept, also_summed) = a.region.shape[1], b.extents
    if summed != also_summed:
        raise ValueError(f"rows of {summed} values meet matrices that sum over {also_summed}")
    if summed % entry.multiple or kept % entry.multiple:
        raise ValueError(
            f"members of {kept} x {summed} do not fit products of {a.encoding.codec} in groups, which take multiples "
            f"of {entry.multiple}; pad with zeros"
        )
    with as_given(result.out.device.type):
        entry.rows(a, b, result)
    return result.out


def multiply_sums(a: Rows, b: Rows, result: SumsResult) -> Tensor:
    """Writes a[rows of g]^T b[rows of g] for every group g; returns `result.out`. Raises as `multiply_rows` does."""
    sums = find_sums(a.encoding, b.encoding, target_of(result.out.device)).sums
    assert sums is not None
    with as_given(result.out.device.type):
        sums(a, b, result)
    return result.out


def as_given(device: str) -> AbstractContextManager[Any]:
    """A block in which products of torch are computed in the types of their operands, whatever its autocast says."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def find(a: KnownEncoding, b: KnownEncoding, target: str) -> Entry:
    """What multiplies rows of `a` with members of `b` on a target, see `target_of`; raises as `multiply_rows` does."""
    return _find(a.codec, b.codec, target, sums=False)


def find_sums(a: KnownEncoding, b: KnownEncoding, target: str) -> Entry:
    """What sums products of `a` and `b` over rows; raises as `multiply_sums` does."""
    return _find(a.codec, b.codec, target, sums=True)


@lru_cache(maxsize=1024)
def _find(a: Numerics, b: Numerics, target: str, *, sums: bool) -> Entry:
    """`sums`: whether both are rows in groups, not the first alone."""
    entry = _TABLE.get((type(a), type(b), target))
    if entry is None or (sums and entry.sums is None):
        raise NotImplementedError(
            f"no {'sums' if sums else 'products'} in groups of {type(a).__name__} by {type(b).__name__} on {target}; "
            f"there are those of {_known(target, sums=sums)}. Choose a recipe "
            "whose pairs are among them, or multiply each group alone (te_dist.Linear)"
        )
    check_transforms(a, b)
    for codec in (a, b) if sums else (a,):
        if isinstance(codec, Block) and 1 not in codec.tile:
            raise NotImplementedError(
                f"no products in groups of rows whose scales cover squares, got {codec}; take runs for what is no "
                "weight (x_block_scaling_dim=1, grad_block_scaling_dim=1)"
            )
        if isinstance(codec, NvFp4) and codec.row_scaled:
            raise NotImplementedError(
                "no products in groups of NVFP4 with an amax for every row; set row_scaled_activation=False"
            )
    return entry


def _known(target: str, *, sums: bool) -> list[str]:
    """Pairs that there are functions for."""
    entries = ((*key, entry) for key, entry in _TABLE.items())
    return sorted(
        f"{a.__name__} by {b.__name__}" for a, b, where, e in entries if where == target and (e.sums or not sums)
    )


def implements(pairs: Iterable[tuple[type[Codec], type[Codec]]], entry: Entry) -> None:
    """Enters functions for `pairs` of codec types, on CPU and GPU alike; a pair can have one only."""
    for key in ((*pair, target) for pair in pairs for target in _TARGETS):
        if key in _TABLE:
            raise ValueError(f"{key} is implemented twice; remove one")
        _TABLE[key] = entry


def reads_as_they_lie(a: Rows, b: Members, out: Tensor) -> bool:
    """Whether products of rows read members that lie along what they keep, and sooner than transposed ones.

    So they do of FP8 blocks whose scales cover squares, to 16 bits, where few rows read each member. The values are the
    same.
    """
    left, right = a.encoding.codec, b.encoding.codec
    if not (isinstance(left, Block) and isinstance(right, Block)) or 1 in right.tile or out.element_size() > 2:  # noqa: PLR2004
        return False
    (_, summed), groups = b.extents, len(b.stored[0])
    return summed % TILE == 0 and is_turned_sooner(a.region.shape[0], groups)


def _stacked(stored: Tensor) -> Tensor:
    """Members (G, outer, inner) below each other."""
    return stored.flatten(0, 1)


def _codes(b: Members) -> Tensor:
    """(G * kept, summed) codes, the summed dimension contiguous."""
    assert b.encoding.fields[0].inner_dim == b.sums_over
    return _stacked(b.stored[0])


def _block_rows(a: Rows, b: Members, result: Result) -> None:
    tile = b.encoding.codec.tile
    data, scale = a.stored
    ops.grouped_gemm_float8_block(
        data,
        scale,
        _stacked(b.stored[0]),
        _stacked(b.stored[1]),
        table=result.table,
        summed_dim=1 if b.encoding.fields[0].inner_dim == b.sums_over else 0,
        b_tile=tile if b.sums_over == 1 else tile[::-1],
        fp8=(a.encoding.codec.fp8, b.encoding.codec.fp8),
        bias=result.bias,
        row_factor=None,
        accumulate=result.accumulate,
        out=result.out,
    )


def _block_sums(a: Rows, b: Rows, result: SumsResult) -> None:
    fp8 = a.encoding.codec.fp8, b.encoding.codec.fp8
    ops.grouped_wgrad_float8_block(
        *a.stored, *b.stored, table=result.table, fp8=fp8, accumulate=result.accumulate, out=_stacked(result.out)
    )


def _whole_rows(a: Rows, b: Members, result: Result) -> None:
    """Forward is summed in the tensor cores' own precision, gradients in fp32, as TransformerEngine's recipes do."""
    ops.grouped_gemm_float8_tensor(
        a.stored[0],
        a.stored[1].view(-1),
        _codes(b),
        b.stored[1].view(-1),
        table=result.table,
        fp8=(a.encoding.codec.fp8, b.encoding.codec.fp8),
        fast=b.sums_over == 1,
        bias=result.bias,
        row_factor=None,
        accumulate=result.accumulate,
        out=result.out,
    )


def _whole_sums(a: Rows, b: Rows, result: SumsResult) -> None:
    scales = a.stored[1].view(-1), b.stored[1].view(-1)
    fp8 = a.encoding.codec.fp8, b.encoding.codec.fp8
    ops.grouped_wgrad_float8_tensor(
        a.stored[0],
        scales[0],
        b.stored[0],
        scales[1],
        table=result.table,
        fp8=fp8,
        accumulate=result.accumulate,
        out=_stacked(result.out),
    )


def _decoded_rows(a: Rows, b: Members, result: Result) -> None:
    table, bias, accumulate, out = result
    ops.grouped_gemm_decoded(_coded(a), _coded_members(b), table=table, bias=bias, accumulate=accumulate, out=out)


def _decoded_sums(a: Rows, b: Rows, result: SumsResult) -> None:
    table, accumulate, out = result
    ops.grouped_wgrad_decoded(_coded(a), _coded(b), table=table, accumulate=accumulate, out=_stacked(out))


def _coded(rows: Rows) -> Coded:
    encoding, stored, region, summed = rows
    found = coded(Operand(_without_amax(encoding), stored[:2], region, summed))
    return Coded(*found[:5], factor=_factor(encoding, stored), constant=found.constant)


@lru_cache(maxsize=1024)
def _without_amax(encoding: KnownEncoding) -> Encoding:
    return Encoding(encoding.codec, encoding.fields[:2])


def _factor(encoding: KnownEncoding, stored: tuple[Tensor, ...]) -> Tensor | None:
    """(G, 1), or (1, 1), of what has an amax."""
    return stored[2].reshape(-1, 1) if len(encoding.fields) > 2 else None


def _coded_members(b: Members) -> Coded:
    """Members below each other; a copy of the scales where padding lies between those of two members."""
    encoding, stored, region, summed = b
    views = [_beside(field, part, region) for field, part in zip(encoding.fields[:2], stored, strict=False)]
    codes, scale = (
        view if field.inner_dim == summed else view.t() for field, view in zip(encoding.fields, views, strict=False)
    )
    grain = encoding.fields[1].grain
    known = coded(Operand(_without_amax(encoding), (stored[0][0], stored[1][0]), region, summed))
    tile = grain if summed == 1 else (grain[1], grain[0])
    return Coded(codes, known.kind, scale, tile, factor=_factor(encoding, stored), constant=known.constant)


def _beside(field: Field, stored: Tensor, region: Region) -> Tensor:
    """(G * outer, inner) of a field without its padding."""
    outer, inner = field.compact_shape(region)
    if stored.shape[1] != outer:
        stored = stored[:, :outer].contiguous()
    return _stacked(stored)[:, :inner]


def _plain_rows(a: Rows, b: Members, result: Result) -> None:
    table, bias, accumulate, out = result
    left, right = a.stored[0], b.stored[0]
    if left.dtype == right.dtype and left.dtype in HALVES:
        rest: dict[str, Any] = dict(summed_dim=b.sums_over, bias=bias, row_factor=None, accumulate=accumulate)
        return ops.grouped_gemm_half(left, _stacked(right), table=table, **rest, out=out)
    dtype = torch.promote_types(left.dtype, right.dtype)
    for group, rows in _groups(table):
        member = right[group].to(dtype)
        product = left[rows].to(dtype) @ (member.t() if b.sums_over == 1 else member)
        if bias is not None:
            product = product + bias[group]  # not in place: selective checkpointing may hold what `mm` gave
        (out[rows].add_ if accumulate else out[rows].copy_)(product)


def _plain_sums(a: Rows, b: Rows, result: SumsResult) -> None:
    table, accumulate, out = result
    left, right = a.stored[0], b.stored[0]
    if left.dtype == right.dtype and left.dtype in HALVES:
        return ops.grouped_wgrad_half(left, right, table=table, accumulate=accumulate, out=_stacked(out))
    dtype = torch.promote_types(left.dtype, right.dtype)
    for group, rows in _groups(table):
        product = left[rows].to(dtype).t() @ right[rows].to(dtype)
        (out[group].add_ if accumulate else out[group].copy_)(product)


def _valued_rows(a: Rows, b: Members, result: Result) -> None:
    """Plain rows with the values of quantized members, which are written for the product, each by its own launch."""
    encoding, stored, region, sums_over = b
    dtype = a.stored[0].dtype
    whole = torch.empty((len(stored[0]), *region.shape), dtype=dtype, device=result.out.device)
    for number, out in enumerate(whole):
        encoding.codec.operand(tuple(part[number] for part in stored), encoding.fields, region, out=out)
    plain = Encoding(HighPrecision(dtype), a.encoding.fields)
    _plain_rows(a, Members(plain, (whole,), region, sums_over), result)


def _groups(table: Tensor) -> list[tuple[int, slice]]:
    """See [Note: What products in groups wait for]."""
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "products in groups of fp32 read the sizes of groups on the host, which a CUDA graph cannot hold; multiply "
            "in bf16, inside of torch.autocast or of te_dist.autocast(recipe=...)"
        )
    begins = table[0].tolist()
    return [(group, slice(*begins[group : group + 2])) for group in range(len(begins) - 1)]


_DECODED = (MxFp8, NvFp4)
implements([(Block, Block)], Entry(_block_rows, _block_sums, 16))
implements([(Tensorwise, Tensorwise)], Entry(_whole_rows, _whole_sums, 16))
implements(product(_DECODED, _DECODED), Entry(_decoded_rows, _decoded_sums, STEP))
implements([(HighPrecision, HighPrecision)], Entry(_plain_rows, _plain_sums, 1))
implements([(HighPrecision, kind) for kind in (Block, Tensorwise, *_DECODED)], Entry(_valued_rows, None, 1))
