"""What a codec is: the numerics of one direction, opaque to everything that only moves bytes.

A codec knows how values become codes and scales and back. It is a frozen dataclass, so that two encodings can be
compared. Where its outputs lie is said by the `Field`s handed to it; how ranks come to agree on an amax is the
caller's business: `amax` finds it, the caller may reduce it, `encode` takes it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from te_dist.formats import Field, Region, geometry
from te_dist.formats.region import Pair
from te_dist.ops import tile_amax
from te_dist.ops.source import Source, unsummed

MOVE_SAVED = (  # ends errors of values that hooks on saved tensors ask for
    "What autograd saves is moved as it is by te_dist.offload.activations() or save_on_cpu(pin_memory=False); torch's "
    "save_on_cpu(pin_memory=True) and offload_wrapper copy its values"
)
_ROUNDING = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}  # see `Codec.rounding`
Amax = tuple[Tensor, ...]  # one fp32 grid per entry of `Codec.amax_tiles`


class KnownEncoding(Protocol):
    """An `Encoding` as it is read where the type of its codec is known: by it, and by what is entered for it."""

    @property
    def codec(self) -> Any: ...

    @property
    def fields(self) -> tuple[Field, ...]: ...


class Plane(NamedTuple):
    """One direction to be written: its encoding, its stored tensors, and the amax to use where it is already known."""

    encoding: KnownEncoding
    stored: tuple[Tensor, ...]
    amax: Amax | None = None

    def field_view(self, index: int, region: Region) -> Tensor:
        """Logical (rows, cols) view on the grain grid of the field at `index`."""
        return logical_view(self.encoding.fields[index], self.stored[index], region)


@dataclass(frozen=True)
class Codec:
    """Base of all codecs. Subclasses are frozen dataclasses that hold every parameter of their numerics."""

    pads_groups: ClassVar[bool] = True  # columnwise, groups of rows begin at tiles of their own

    @property
    def deterministic(self) -> bool:
        """Whether quantizing twice gives the same bytes."""
        return True

    @property
    def amax_tiles(self) -> tuple[Pair, ...]:
        """Logical tiles whose largest magnitude fixes the scales; ranks that share one must agree on it."""
        return ()

    @property
    def rounding(self) -> float | None:
        """Largest distance of a value from what it is rounded to, over the value, where that is not lost to zero; None
        where values beside it have a say."""
        return None

    @property
    def pass_key(self) -> object:
        """Planes whose keys are equal are written in one pass over the input."""
        return self

    @property
    def turned(self) -> Codec | None:
        """What makes of the transpose of a matrix the transpose of what this makes of it; None where nothing does."""
        return None

    def alignment(self, dim: int) -> int:
        """Logical `dim` may be cut at multiples of this only."""
        return 1

    def check(self, region: Region) -> None:
        """Raises ValueError where a matrix of this region cannot be encoded."""

    def amax(self, x: Tensor | Source, region: Region) -> Amax:
        """Largest magnitudes of `x` (rows, cols), NaN ignored: one fp32 grid per entry of `amax_tiles`."""
        return tuple(find_amax(x, region, tile) for tile in self.amax_tiles)

    def encode(self, x: Tensor | Source, region: Region, planes: Sequence[Plane]) -> None:
        """Quantizes `x` into one or two planes of equal `pass_key`.

        Args:
            x: (rows, cols), fp32, bf16 or fp16, contiguous; or a source, whose sums are found once.
        """
        raise NotImplementedError

    def encode_groups(self, x: Tensor | Source, table: Tensor, planes: Sequence[Plane]) -> None:
        """Quantizes every group of rows of `x` as if it were alone, into one or two planes of equal `pass_key`.

        Args:
            x: (T, K), fp32, bf16 or fp16, contiguous; or a source.
            table: int32 (4, G + 1), see `ops.group_table`.
            planes: laid out as `tensor.GroupedRows` says.

        Raises:
            NotImplementedError: there is no kernel for groups in this encoding.
        """
        raise NotImplementedError(f"no quantizer of groups of rows for {self}; choose a recipe without it")

    def operand(self, stored: Sequence[Tensor], fields: Sequence[Field], region: Region, *, out: Tensor) -> None:
        """Writes what a GEMM reads from this encoding into `out` (rows, cols; fp32, bf16 or fp16)."""
        raise NotImplementedError

    def decode(self, stored: Sequence[Tensor], fields: Sequence[Field], region: Region, *, out: Tensor) -> None:
        """Writes the values that this encoding stands for into `out`; `operand`, with any transform undone."""
        self.operand(stored, fields, region, out=out)


class OfFloat8:
    """Mixin of codecs whose codes are FP8 values, times a scale: "e4m3" or "e5m2"."""

    fp8: str

    @property
    def rounding(self) -> float:
        """See `Codec`."""
        return _ROUNDING[self.fp8]


def logical_view(field: Field, stored: Tensor, region: Region) -> Tensor:
    """Unpadded view of a stored, unpacked field in logical (row, col) order."""
    wire = geometry.compact(field, stored, region)
    return wire.t() if field.order == "km" else wire


def encode(x: Tensor | Source, region: Region, planes: Sequence[Plane]) -> None:
    """Quantizes `x` into all `planes`, in as few passes over it as their codecs allow."""
    codec = planes[0].encoding.codec
    alike = [plane for plane in planes if plane.encoding.codec.pass_key == codec.pass_key]
    codec.encode(x, region, alike)
    if len(alike) < len(planes):
        encode(unsummed(x), region, [plane for plane in planes if plane.encoding.codec.pass_key != codec.pass_key])


def encode_groups(x: Tensor | Source, table: Tensor, planes: Sequence[Plane]) -> None:
    """Quantizes groups of rows into all `planes`, in as few passes over `x` as their codecs allow."""
    codec = planes[0].encoding.codec
    alike = [plane for plane in planes if plane.encoding.codec.pass_key == codec.pass_key]
    codec.encode_groups(x, table, alike)
    if len(alike) < len(planes):
        others = [plane for plane in planes if plane.encoding.codec.pass_key != codec.pass_key]
        encode_groups(unsummed(x), table, others)


def find_amax(x: Tensor | Source, region: Region, tile: Pair) -> Tensor:
    """Largest magnitude of every tile of `x` (rows, cols), NaN ignored: fp32, on the tile grid of `region`."""
    rows, cols = region.blocks(tile)
    out = torch.empty((len(rows), len(cols)), dtype=torch.float32, device=x.device)
    tile_amax(x, phase=region.phase(tile), tile=tile, out=out)
    return out


def check_is_one(value: Tensor) -> None:
    """Raises ValueError for the scales or amaxes (G,) of rows in groups, of which one matrix has one."""
    if value.dim() == 1 and value.numel() != 1:
        raise ValueError(
            f"rows in groups, as a GroupedLinear saves them, have a scale for each group, got {value.numel()}, and "
            f"cannot be dequantized as one matrix. {MOVE_SAVED}"
        )
