"""What every quantizer does; subclasses say into which format.

A quantizer is a description: it holds no buffers. The two that hold something live, a scale kept between steps or a
process group to agree with, are made where these are known and never put on a recipe.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from te_dist import catalog, codecs
from te_dist.codecs.gemm import READS_ANY_ORDER
from te_dist.formats import Direction, Encoding, Format, Region
from te_dist.ops import group_sums
from te_dist.ops._checks import HIGH_PRECISION
from te_dist.ops.group_table import padded_rows
from te_dist.ops.panel_sums import column_sums
from te_dist.ops.source import PANEL, Source, Summed, sums_shape
from te_dist.tensor import (
    GroupedRows,
    QuantizedStorage,
    QuantizedTensor,
    as_matrix,
    collectives,
    empty,
    empty_rows,
    find_amaxes,
)
from te_dist.tensor.parts import check_writable
from te_dist.tensor.quantized_tensor import check_shape, count_writes

Fp8Type = torch.dtype | Literal["e4m3", "e5m2"]
_FP8_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", "e4m3": "e4m3", "e5m2": "e5m2"}


class Usages(TypedDict, total=False):
    """Keywords of `Quantizer.set_usage`."""

    rowwise: bool | None
    columnwise: bool | None


@dataclass
class Quantizer:
    """Base of all quantizers.

    Attributes:
        rowwise: whether `quantize` writes the rowwise direction.
        columnwise: whether it writes the columnwise one.
    """

    rowwise: bool = field(default=True, kw_only=True)
    columnwise: bool = field(default=True, kw_only=True)

    def declare(self, dtype: torch.dtype) -> Format:
        """Every direction this quantizer can write for a tensor of `dtype`, whatever its usages."""
        raise NotImplementedError

    def format(self, dtype: torch.dtype = torch.bfloat16) -> Format:
        """The format of what `quantize` returns for a tensor of `dtype`."""
        declared = self.declare(dtype)
        return declared.select(*(d for d in declared.directions if self.get_usages()[d.value]))

    def quantize(
        self, tensor: Tensor, *, out: QuantizedTensor | None = None, dtype: torch.dtype | None = None
    ) -> QuantizedTensor:
        """Quantizes `tensor` of shape (..., K), into `out` where given. The gradient passes through unchanged.

        Args:
            dtype: nominal dtype of the result; that of `tensor` by default.
        """
        if out is not None:
            return self.update_quantized(tensor, out)
        return _StraightThrough.apply(tensor, self, dtype or tensor.dtype)

    __call__ = quantize

    def encode(self, x: Tensor | Source, *directions: Direction) -> QuantizedStorage:
        """Quantizes `x` in as few passes as can be.

        Args:
            x: (..., K), fp32, bf16 or fp16; or a source (rows, K), which gives the bytes of `values(x)` without writing
                these, and of `Summed` the sums besides.
            directions: those that products will sum along; where a device reads equal values in either order, a
                columnwise direction that is a relayout of the rowwise one is not written. The usages by default.
        """
        format = self.declare(x.dtype) if directions else self.format(x.dtype)
        region = region_of(x.shape)
        fields = format.fields
        if directions and format.columnwise_is_derivable and x.device.type in READS_ANY_ORDER:
            fields = format.canonical.fields
        elif directions:
            format = format.select(*directions)
            fields = format.fields
        for direction in format.directions:
            format[direction].codec.check(region)
        storage = empty(format, region, dtype=x.dtype, device=x.device, fields=fields)
        self.write(x, storage)
        return storage

    def encode_and_sum(self, x: Tensor | Source, *directions: Direction) -> tuple[QuantizedStorage, Tensor]:
        """What `encode` gives, and the sums of the columns of `x`, f32 (K,), found in the same pass: a bias gradient.

        They are bitwise the same every time, on CPU and GPU; see `ops.panel_sums` for the order of summation.
        """
        matrix = as_matrix(x, region_of(x.shape).shape)
        sums = torch.empty(sums_shape(matrix), dtype=torch.float32, device=matrix.device)
        return self.encode(Summed(matrix, sums), *directions), column_sums(sums)

    def encode_groups(self, x: Tensor | Source, table: Tensor, *directions: Direction) -> GroupedRows:
        """Quantizes every group of rows as if it were alone, in as few passes over `x` as can be.

        Rows behind the last group are not read, and what would be theirs is left as it is.
        Stochastic rounding alone depends on more than the group: an element takes the random number of its place in
        the whole matrix.

        Args:
            x: (T, K), fp32, bf16 or fp16; or a source.
            table: int32 (4, G + 1) on the device of `x`, see `ops.group_table`.
            directions: those that products will sum along; the usages by default.

        Raises:
            NotImplementedError: there is no quantizer of groups for this format.
        """
        format = self.declare(x.dtype).select(*directions) if directions else self.format(x.dtype)
        rows = empty_rows(format, (x.shape[0], x.shape[1]), table, dtype=x.dtype)
        self.write_groups(x, rows)
        return rows

    def encode_groups_and_sum(
        self, x: Tensor | Source, table: Tensor, *directions: Direction
    ) -> tuple[GroupedRows, Tensor]:
        """What `encode_groups` gives, and the sums of the columns of every group, f32 (G, K), found in the same pass.

        They are bitwise the same every time, on CPU and GPU; see `ops.group_sums` for the order of summation.
        """
        num_groups = table.shape[1] - 1
        panels = (padded_rows(x.shape[0], num_groups) // PANEL, x.shape[1])
        panel_sums = torch.empty(panels, dtype=torch.float32, device=x.device)
        rows = self.encode_groups(Summed(x, panel_sums), table, *directions)
        sums = torch.empty((num_groups, x.shape[1]), dtype=torch.float32, device=x.device)
        group_sums(panel_sums, table=table, out=sums)
        return rows, sums

    def write_groups(self, x: Tensor | Source, rows: GroupedRows) -> None:
        """Quantizes groups of rows into every direction that `rows` has."""
        planes = [codecs.Plane(rows.format[d], rows.stored(d)) for d in rows.format.independent]
        codecs.encode_groups(as_matrix(x, rows.shape), rows.table, planes)

    @property
    def writes_by_format(self) -> bool:
        """Whether `write` does what the format alone says, and nothing else."""
        return type(self).write is Quantizer.write

    @property
    def takes_groups(self) -> bool:
        """Whether `encode_groups` gives rows of one group the bytes of `encode`. What inherits from others may not."""
        return False

    @property
    def reads_once(self) -> bool:
        """Whether `encode` and `encode_groups` read what they are given, sources too, in one pass. Heirs may not."""
        return False

    @property
    def draws(self) -> bool:
        """Whether `write` draws random numbers. Heirs whose own does say so."""
        format = self.declare(torch.bfloat16)
        return not all(format[direction].codec.deterministic for direction in format.directions)

    def update_quantized(self, src: Tensor, dst: QuantizedTensor) -> QuantizedTensor:
        """Quantizes `src`, of the shape of `dst`, into the buffers that this has.

        Raises:
            ValueError: the shapes differ, or `dst` has a format that this quantizer does not write.
            NotImplementedError: `dst` is a part, and the whole would not see the values.
        """
        if not any(_is_of(dst.format, self.declare(dtype)) for dtype in HIGH_PRECISION):  # of whichever values
            raise ValueError(
                f"out: got {catalog.name_of(dst.format)}, wanted {catalog.name_of(self.declare(dst.dtype))} or a "
                f"direction of it, as {type(self).__name__} makes; use the quantizer that made it, or copy_"
            )
        if self.writes_by_format:
            return dst.quantize_(src)
        check_writable(dst)
        check_shape(src, dst)
        before = dst.storage.num_writes
        self.write(src, dst.storage)
        if dst.storage.num_writes == before:  # else it has been noted
            dst.storage.note_values(as_matrix(src, dst.storage.shape), is_settled=self.settles)
        count_writes(dst)
        return dst

    @property
    def settles(self) -> bool:
        """Whether `write` takes scales that ranks agree on, given ones or such as they find together."""
        return False

    def write(self, x: Tensor | Source, storage: QuantizedStorage) -> None:
        """Quantizes `x` into every direction that `storage` has."""
        storage.quantize_(x)

    def make_empty(
        self,
        shape: torch.Size | tuple[int, ...],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> QuantizedTensor:
        """A tensor of uninitialised buffers (padding zero); on torch's default device where none is given."""
        device = torch.get_default_device() if device is None else device
        return QuantizedTensor(empty(self.format(dtype), region_of(shape), dtype=dtype, device=device), shape)

    def set_usage(self, **usages: Unpack[Usages]) -> None:
        """Changes what later calls write (None: leave it); no tensor that exists is touched."""
        for name, usage in usages.items():
            if name not in self.get_usages():
                raise ValueError(f"set_usage takes rowwise and columnwise, got {name!r}")
            if usage is not None:
                setattr(self, name, usage)

    def get_usages(self) -> dict[str, bool]:
        """{"rowwise": ..., "columnwise": ...}."""
        return {"rowwise": self.rowwise, "columnwise": self.columnwise}

    def copy(self) -> Quantizer:
        """Another quantizer of equal settings; scales and groups are shared."""
        return copy.copy(self)

    def is_quantizable(self, tensor: Tensor) -> bool:
        """Whether `tensor` can be quantized as it is, without padding."""
        usages = tuple(self.format(tensor.dtype).directions)
        extents = region_of(tensor.shape).shape
        return all(extent % self.multiple(dim, tensor.dtype, *usages) == 0 for dim, extent in enumerate(extents))

    def multiple(self, dim: int, dtype: torch.dtype, *directions: Direction) -> int:
        """Extents of dimension `dim` (0: rows, 1: columns) that fit: multiples of this. All directions by default."""
        declared = self.declare(dtype)
        return math.lcm(*(declared.select(d).alignment(dim) for d in directions or declared.directions))


@dataclass
class AgreeingQuantizer(Quantizer):
    """A quantizer of formats with one amax, which may cover the tensors of all ranks of a group.

    Attributes:
        with_amax_reduction: take the largest amax of the group: `encode` is collective then.
        amax_reduction_group: None is the default group.
    """

    with_amax_reduction: bool = field(default=False, kw_only=True)
    amax_reduction_group: dist.ProcessGroup | None = field(default=None, kw_only=True)

    def write(self, x: Tensor | Source, storage: QuantizedStorage) -> None:
        if not self.with_amax_reduction:
            return super().write(x, storage)
        amaxes = find_amaxes(x, storage.format, storage.region)
        of_tensor = [grids[0].view(-1) for grids in amaxes.values()]
        together = torch.cat(of_tensor)
        if not together.is_meta:  # a rehearsal launches what every rank launches, and sends nothing
            collectives.maximum_(together, self.amax_reduction_group)
        for amax, agreed in zip(of_tensor, together.split([a.numel() for a in of_tensor]), strict=True):
            amax.copy_(agreed)
        storage.quantize_(x, amaxes)

    @property
    def writes_by_format(self) -> bool:
        return type(self).write is AgreeingQuantizer.write and not self.with_amax_reduction

    @property
    def settles(self) -> bool:
        return self.with_amax_reduction

    def write_groups(self, x: Tensor | Source, rows: GroupedRows) -> None:
        if self.with_amax_reduction:
            raise ValueError(
                "with_amax_reduction: groups of rows have an amax each, of this rank alone; leave it False for them"
            )
        super().write_groups(x, rows)


def _is_of(format: Format, declared: Format) -> bool:
    """Whether it is a declared one, or of some of its directions."""
    directions = format.directions
    return set(directions) <= set(declared.directions) and format == declared.select(*directions)


class _StraightThrough(torch.autograd.Function):
    """Quantization whose gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> QuantizedTensor:
        storage = quantizer.encode(tensor)
        storage.dtype, ctx.dtype = dtype, tensor.dtype
        return QuantizedTensor(storage, tensor.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].to(ctx.dtype), None, None


def region_of(shape: torch.Size | tuple[int, ...]) -> Region:
    """The whole matrix behind a tensor of this shape: leading dimensions flattened."""
    if not shape:
        raise ValueError("got a tensor without dimensions, wanted (..., K); a single number has no format")
    return Region.whole(math.prod(shape[:-1]), shape[-1])


def fp8_name(dtype: Fp8Type) -> str:
    """ "e4m3" or "e5m2"."""
    if dtype not in _FP8_NAMES:
        raise ValueError(f"fp8_dtype is torch.float8_e4m3fn or torch.float8_e5m2, got {dtype!r}")
    return _FP8_NAMES[dtype]


@cache
def declared(make: Callable[..., Format], *args: Any, **kwargs: Any) -> Format:
    """`make(*args, **kwargs)`, made once."""
    return make(*args, **kwargs)


def with_eps(format: Format, eps: float) -> Format:
    """`format` whose amaxes are at least `eps`."""
    return _with_eps(format, eps) if eps else format


@cache
def _with_eps(format: Format, eps: float) -> Format:
    def raised(encoding: Encoding) -> Encoding:
        return replace(encoding, codec=replace(encoding.codec, eps=eps))  # type: ignore[type-var]

    return Format(**{direction.value: raised(format[direction]) for direction in format.directions})
