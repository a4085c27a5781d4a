"""Which function multiplies which pair of encodings: one table, without a default.

A product sums over one logical dimension of each operand and keeps the other:

    forward  y  (M, N) = x  (M, K) . weight (N, K)     both sum over their columns
    dgrad    dx (M, K) = dy (M, N) . weight (N, K)     dy over its columns, weight over its rows
    wgrad    dw (N, K) = dy (M, N) . x (M, K)          both over their rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_dist import ops
from te_dist.codecs.base import Codec, KnownEncoding
from te_dist.codecs.block import LARGEST_TILE, Block
from te_dist.codecs.decoded import coded
from te_dist.codecs.high_precision import HighPrecision
from te_dist.codecs.mxfp8 import MxFp8
from te_dist.codecs.nvfp4 import NvFp4
from te_dist.codecs.tensorwise import Tensorwise
from te_dist.formats import Region
from te_dist.formats.field import Numerics
from te_dist.formats.region import Pair
from te_dist.kernels.gemm import Kind, fits_map, is_narrow, parts_of
from te_dist.kernels.gemm_tensor import SCALE_ALIGNMENT
from te_dist.kernels.runtime import ARCHES, target_of
from te_dist.ops.gemm_float8_block import fits_phase


class Operand(NamedTuple):
    """One matrix of a product, as it is stored.

    Attributes:
        encoding: what is read.
        stored: its stored tensors.
        region: rows and columns they describe.
        sums_over: logical dimension (0: rows, 1: columns) that the product sums over.
    """

    encoding: KnownEncoding
    stored: tuple[Tensor, ...]
    region: Region
    sums_over: int

    @property
    def device(self) -> torch.device:
        return self.stored[0].device

    @property
    def extents(self) -> tuple[int, int]:
        """(kept, summed)."""
        rows, cols = self.region.shape
        return (rows, cols) if self.sums_over == 1 else (cols, rows)

    def matrix(self) -> Tensor:
        """(kept, summed) view of the first stored tensor."""
        stored_as = 1 if self.encoding.fields[0].order == "mk" else 0
        return self.stored[0] if stored_as == self.sums_over else self.stored[0].t()

    def values(self, dtype: torch.dtype) -> Tensor:
        """(kept, summed) values in `dtype`: what is multiplied, any transform left in."""
        out = torch.empty(self.region.shape, dtype=dtype, device=self.device)
        self.encoding.codec.operand(self.stored, self.encoding.fields, self.region, out=out)
        return out if self.sums_over == 1 else out.t()


class Result(NamedTuple):
    """Where a product goes.

    Attributes:
        out: (kept of a, kept of b), contiguous.
        bias: (kept of b,), added before rounding to the type of `out`; None for none.
        accumulate: whether the product is added to what `out` (fp32) holds.
    """

    out: Tensor
    bias: Tensor | None
    accumulate: bool


class Entry(NamedTuple):
    """One function of the table.

    Attributes:
        gemm: writes the product.
        multiple: extents it takes are multiples of this.
    """

    gemm: Callable[[Operand, Operand, Result], None]
    multiple: int


QUANTIZED = (Block, MxFp8, NvFp4, Tensorwise)
_RUN, _SQUARE = (1, LARGEST_TILE[1]), LARGEST_TILE
_WORKSPACE_BYTES = 2**25  # as torch gives cuBLASLt on Hopper
READS_ANY_ORDER = ("cpu",)  # types of devices whose functions read either direction of equal values alike
_TABLE: dict[tuple[type[Numerics], type[Numerics], str], Entry] = {}  # by codecs and target, see `target_of`


def multiply(
    a: Operand,
    b: Operand,
    *,
    dtype: torch.dtype,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """(kept of a, kept of b) product in `dtype`.

    Args:
        a, b: both sum over the same extent.
        dtype: fp32, bf16 or fp16.
        out: where it is written; contiguous, of `dtype`. Made where not given.
        bias: (kept of b,), added before rounding to `dtype`.
        accumulate: add to what `out`, fp32, holds.

    Raises:
        NotImplementedError: no function multiplies these two encodings on this device.
        ValueError: the operands were not transformed alike, do not sum over the same extent, or have extents that the
            function does not take.
    """
    target = target_of(a.device)
    entry = find(a.encoding.codec, b.encoding.codec, target)
    (rows, summed), (cols, also_summed) = a.extents, b.extents
    if summed != also_summed:
        raise ValueError(f"a product sums over {summed} values of one operand and {also_summed} of the other")
    if summed % entry.multiple or cols % entry.multiple:
        raise ValueError(
            f"a product of {rows} x {summed} by {summed} x {cols} does not fit {type(a.encoding.codec).__name__} on "
            f"{target}, which takes multiples of {entry.multiple} but for the first; pad with zeros"
        )
    if out is None:
        out = torch.empty((rows, cols), dtype=dtype, device=a.device)
    entry.gemm(a, b, Result(out, bias, accumulate))
    return out


def find(a: Numerics, b: Numerics, target: str) -> Entry:
    """What multiplies encodings of `a` and `b` on a target, see `target_of`; raises as `multiply` does."""
    entry = _TABLE.get((type(a), type(b), target))
    if entry is None:
        known = sorted(where for *pair, where in _TABLE if pair == [type(a), type(b)])
        raise NotImplementedError(
            f"no GEMM of {type(a).__name__} by {type(b).__name__} on {target}; there is one on {', '.join(known)}. "
            f"Choose a recipe whose pairs exist on {target}, or move the module"
        )
    check_transforms(a, b)
    return entry


def check_transforms(a: Numerics, b: Numerics) -> None:
    """Raises ValueError where the operands of a product are not transformed alike."""
    transforms = _transform(a), _transform(b)
    if transforms[0] != transforms[1]:
        raise ValueError(
            f"operands of one product must be transformed alike, got sign masks {transforms[0]} and {transforms[1]} "
            f"(None: not transformed) of {a} and {b}; give both the same hadamard or none"
        )


def implements(pairs: Iterable[tuple[type[Codec], type[Codec]]], *targets: str, multiple: int = 1) -> Callable:
    """Decorator: enters a function for `pairs` of codec types on `targets`; a pair can have one only on each."""

    def register(gemm: Callable[[Operand, Operand, Result], None]) -> Callable[[Operand, Operand, Result], None]:
        for key in ((*pair, target) for pair in pairs for target in targets):
            if key in _TABLE:
                raise ValueError(f"{key} is implemented twice; remove one function")
            _TABLE[key] = Entry(gemm, multiple)
        return gemm

    return register


def _transform(codec: Numerics) -> int | None:
    """The sign mask of the Hadamard transform that a product has to undo; None for no transform."""
    return codec.hadamard if isinstance(codec, NvFp4) else None


_EVERY = (*QUANTIZED, HighPrecision)
_ALL = frozenset(product(_EVERY, _EVERY))
_BLOCK, _TENSORWISE, _HIGH_PRECISION = (Block, Block), (Tensorwise, Tensorwise), (HighPrecision, HighPrecision)


@implements(_ALL, "cpu")
def _by_values(a: Operand, b: Operand, result: Result) -> None:
    """Values in fp32, where every code times its scale is rounded once, multiplied in fp32: the definition."""
    product = torch.empty(result.out.shape, dtype=torch.float32, device=result.out.device)
    # NOTE: functions that write into `out` are left alone by torch.autocast.
    torch.mm(a.values(torch.float32), b.values(torch.float32).t(), out=product)
    if result.bias is not None:
        product.add_(result.bias)
    (result.out.add_ if result.accumulate else result.out.copy_)(product)


@implements(_ALL - {_BLOCK, _TENSORWISE, _HIGH_PRECISION}, "sm_90a")
def _by_decoding(a: Operand, b: Operand, result: Result) -> None:
    """Codes are decoded on their way to tensor cores. Beside fp32 values, which those would round, by values."""
    if any(
        isinstance(codec, HighPrecision) and codec.dtype == torch.float32
        for codec in (a.encoding.codec, b.encoding.codec)
    ):
        return _by_values(a, b, result)
    ops.gemm_decoded(coded(a), coded(b), out=result.out, bias=result.bias, accumulate=result.accumulate)


@implements([_BLOCK], "sm_90a", multiple=16)
def _by_blocks(a: Operand, b: Operand, result: Result) -> None:
    """Runs along the sum times runs, or squares, wherever in a tile both begin; others by decoding."""
    (a_tile, a_phase), (b_tile, phase) = (_tile_of(operand) for operand in (a, b))
    if a_tile != _RUN or b_tile not in (_RUN, _SQUARE) or a_phase[1] != phase[1] or not fits_phase(phase, b_tile):
        return _by_decoding(a, b, result)
    out, bias, accumulate = result
    how = dict[str, Any](b_tile=b_tile, phase=phase, fp8=(a.encoding.codec.fp8, b.encoding.codec.fp8))
    parts = _parts(a, b, result) if a.sums_over == b.sums_over == 0 else 1
    if parts == 1:
        return ops.gemm_float8_block(*a.stored, *b.stored, **how, parts=1, bias=bias, accumulate=accumulate, out=out)
    below = torch.empty((parts * out.shape[0], out.shape[1]), dtype=torch.float32, device=out.device)
    ops.gemm_float8_block(*a.stored, *b.stored, **how, parts=parts, bias=None, accumulate=False, out=below)
    ops.add_parts(below, accumulate=accumulate, out=out)


def _parts(a: Operand, b: Operand, result: Result) -> int:
    """Into how many a sum over rows is cut, of which there are many; each row of other products has its bits in any."""
    if result.bias is not None:
        return 1
    (rows, _), (cols, _) = a.extents, b.extents
    kind = Kind(b.encoding.codec.tile == _SQUARE, result.out.element_size(), result.accumulate)
    return parts_of(rows, cols, len(a.region.rows.blocks(LARGEST_TILE[0])), kind)


def _tile_of(operand: Operand) -> tuple[Pair, Pair]:
    """Tile of a block codec, and where in one the operand begins, both as (kept, summed)."""
    tile = operand.encoding.codec.tile
    phase = operand.region.phase(tile)
    return (tile, phase) if operand.sums_over == 1 else (tile[::-1], (phase[1], phase[0]))


@implements([_TENSORWISE], *ARCHES, multiple=16)
def _by_cublaslt(a: Operand, b: Operand, result: Result) -> None:
    """cuBLASLt reads both operands with the summed dimension contiguous, and adds a bias of the type of the output.

    Forward accumulates in the tensor cores' own precision, gradients in fp32, as TransformerEngine's recipes do.
    """
    out, bias, accumulate = result
    fp8 = a.encoding.codec.fp8, b.encoding.codec.fp8
    if fp8 == ("e5m2", "e5m2"):
        return _by_decoding(a, b, result)  # cuBLASLt multiplies e4m3 with either, e5m2 with e4m3 only
    fused = bias.to(out.dtype) if bias is not None and out.dtype != torch.float32 else None
    is_direct = fits_map(out)
    target = out if is_direct else torch.empty_like(out)
    ops.gemm_float8_tensor(
        *_readable(*a.stored),
        *_readable(*b.stored),
        fp8=fp8,
        bias=fused,
        fast=a.sums_over == b.sums_over == 1,
        accumulate=accumulate and is_direct,
        workspace=_workspace(a, b),
        out=target,
    )
    if not is_direct:
        (out.add_ if accumulate else out.copy_)(target)
    if bias is not None and fused is None:
        out.add_(bias)


def _workspace(a: Operand, b: Operand) -> Tensor | None:
    """For sums over many rows with few outputs, which cuBLASLt cuts into parts; others are not faster with one."""
    (rows, summed), (cols, _) = a.extents, b.extents
    if a.sums_over == 1 or b.sums_over == 1 or not is_narrow(rows, cols, summed // LARGEST_TILE[0]):
        return None
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=a.device)


def _readable(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Both; the scale, which may be one of several that lie together, where cuBLASLt can read it."""
    return codes, scale if scale.data_ptr() % SCALE_ALIGNMENT == 0 else scale.clone()


@implements([_HIGH_PRECISION], *ARCHES)
def _by_torch(a: Operand, b: Operand, result: Result) -> None:
    """torch's own matrix product in the type of the operands, the wider where they differ."""
    out, bias, accumulate = result
    dtype = torch.promote_types(*(operand.encoding.codec.dtype for operand in (a, b)))
    left, right = a.matrix().to(dtype), b.matrix().to(dtype).t()
    # NOTE: functions that write into `out` are left alone by torch.autocast.
    target = torch.empty_like(out, dtype=dtype) if accumulate or out.dtype != dtype else out
    if bias is None:
        torch.mm(left, right, out=target)
    else:
        torch.addmm(bias.to(dtype), left, right, out=target)
    if accumulate:
        out.add_(target)
    elif target is not out:
        out.copy_(target)
