"""Where each stored value of a quantized matrix lies. Declarations only: no numerics, no tensors.

A quantized tensor is a logical matrix of M rows and K columns (leading dimensions flattened into M), described for up
to two GEMM directions. Every direction is an `Encoding`: an opaque codec and the `Field`s it stores, each a 2-D tensor.
`formats.geometry` moves stored bytes by these declarations alone.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from te_dist.formats.region import WHOLE, Pair, Region, Span, hashed_once

Order = Literal["mk", "km"]
_AS_GRAIN: Pair = (-1, -1)


class Direction(Enum):
    """The GEMM operand a representation is laid out for."""

    ROWWISE = "rowwise"  # contraction runs along K: weight and input of the forward pass
    COLUMNWISE = "columnwise"  # contraction runs along M: weight in dgrad, both operands of wgrad

    __hash__ = object.__hash__  # members are singletons; Enum hashes their names, in Python


@hashed_once
@dataclass(frozen=True)
class Field:
    """One stored 2-D tensor of a quantized matrix.

    Attributes:
        name: attribute under which the buffer is known; must not shadow one of `torch.Tensor`.
        dtype: torch dtype of the stored elements.
        grain: logical (rows, cols) behind one stored value; `WHOLE` covers the entire dimension.
        order: "mk" keeps the logical order, "km" stores the transpose (K outermost in memory).
        pack: stored values per element of `dtype`, along the inner stored dimension (FP4: 2).
        pad: stored (outer, inner) extents are rounded up to these multiples; padding holds zeros.
        tile: logical (rows, cols) on which the value is constant; `grain` where not given.
        sealed: the order inside is private to a kernel; the field can be neither cut nor moved.
    """

    name: str
    dtype: torch.dtype
    grain: Pair = (1, 1)
    order: Order = "mk"
    pack: int = 1
    pad: Pair = (1, 1)
    tile: Pair = _AS_GRAIN
    sealed: bool = False

    def __post_init__(self) -> None:
        if hasattr(torch.Tensor, self.name):
            raise ValueError(f"field name {self.name!r} would shadow torch.Tensor.{self.name}; choose another")
        if self.pack not in (1, 2) or (self.pack == 2 and self.dtype != torch.uint8):
            raise ValueError(
                f"field {self.name!r}: pack is 1, or 2 for nibbles in torch.uint8; got {self.pack} in {self.dtype}"
            )
        if self.tile == _AS_GRAIN:
            object.__setattr__(self, "tile", self.grain)
        for grain, tile in zip(self.grain, self.tile, strict=True):
            if (grain == WHOLE) != (tile == WHOLE) or (grain != WHOLE and tile % grain):
                raise ValueError(f"field {self.name!r}: tile {self.tile} is no multiple of grain {self.grain}")

    @property
    def inner_dim(self) -> int:
        """Logical dimension (0: M, 1: K) that is contiguous in memory."""
        return 1 if self.order == "mk" else 0

    @property
    def bits(self) -> int:
        """Bits of one stored value."""
        return self.dtype.itemsize * 8 // self.pack

    def is_shared(self, dim: int) -> bool:
        """Whether shards along logical `dim` hold the same value (a per-tensor scale)."""
        return self.grain[dim] == WHOLE

    def alignment(self, dim: int) -> int:
        """Logical `dim` may be cut at multiples of this only: no cut falls inside a stored byte."""
        return self.grain[dim] * self.pack if dim == self.inner_dim and self.pack > 1 else 1

    def compact_shape(self, region: Region) -> Pair:
        """Stored (outer, inner) extents of the values that touch `region`, without padding."""
        return _shapes(self, region)[0]

    def shape(self, region: Region) -> Pair:
        """Allocated (outer, inner) extents: `compact_shape` rounded up to `pad`."""
        return _shapes(self, region)[1]

    def shape_of(self, rows: int, cols: Span) -> Pair:
        """`shape` of all rows of a matrix, whose number may be a compiler's symbol, which no cache has."""
        row_grain, col_grain = self.grain
        num_rows = 1 if row_grain == WHOLE else -(-rows // row_grain)
        return _stored(self, num_rows, len(cols.blocks(col_grain)))[1]

    def compact_bytes(self, region: Region) -> int:
        """Bytes of the unpadded field: what crosses a wire or goes to disk."""
        return math.prod(self.compact_shape(region)) * self.dtype.itemsize

    def is_padded(self, region: Region) -> bool:
        """Whether the allocation of `region` holds padding."""
        compact, allocated = _shapes(self, region)
        return compact != allocated


@lru_cache(maxsize=16384)
def _shapes(field: Field, region: Region) -> tuple[Pair, Pair]:
    """`Field.compact_shape` and `Field.shape`."""
    rows, cols = (len(span) for span in region.blocks(field.grain))
    return _stored(field, rows, cols)


def _stored(field: Field, rows: int, cols: int) -> tuple[Pair, Pair]:
    """The same, of as many rows and columns of values."""
    outer, inner = (rows, cols) if field.order == "mk" else (cols, rows)
    inner = -(-inner // field.pack)
    return (outer, inner), (-(-outer // field.pad[0]) * field.pad[0], -(-inner // field.pad[1]) * field.pad[1])


class Numerics(Protocol):
    """All that is asked of a codec by what tells none apart: see `codecs.Codec`. Formats themselves only compare and
    hash codecs, and ask where a matrix may be cut."""

    pads_groups: ClassVar[bool]

    def __hash__(self) -> int: ...

    @property
    def deterministic(self) -> bool: ...

    @property
    def amax_tiles(self) -> tuple[Pair, ...]: ...

    @property
    def rounding(self) -> float | None: ...

    @property
    def pass_key(self) -> object: ...

    def alignment(self, dim: int) -> int: ...

    def check(self, region: Region) -> None: ...

    def amax(self, x: Any, region: Region) -> tuple[Tensor, ...]: ...

    def encode(self, x: Any, region: Region, planes: Any) -> None: ...

    def encode_groups(self, x: Any, table: Tensor, planes: Any) -> None: ...

    def operand(self, stored: Sequence[Tensor], fields: Sequence[Field], region: Region, *, out: Tensor) -> None: ...

    def decode(self, stored: Sequence[Tensor], fields: Sequence[Field], region: Region, *, out: Tensor) -> None: ...


@hashed_once
@dataclass(frozen=True)
class Encoding:
    """A self-sufficient representation for one GEMM direction.

    Attributes:
        codec: the numerics, opaque here; compared, never inspected.
        fields: what the codec stores, in the order it produces values.
    """

    codec: Numerics
    fields: tuple[Field, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the fields."""
        return tuple(field.name for field in self.fields)


@hashed_once
@dataclass(frozen=True)
class Format:
    """Up to two encodings of one logical matrix. A hybrid is `Format(a.rowwise, b.columnwise)`."""

    rowwise: Encoding | None = None
    columnwise: Encoding | None = None

    def __post_init__(self) -> None:
        if self.rowwise is None and self.columnwise is None:
            raise ValueError("a format needs at least one direction, got neither rowwise nor columnwise")
        by_name: dict[str, Field] = {}
        for direction in self.directions:
            for declared in self[direction].fields:
                if by_name.setdefault(declared.name, declared) != declared:
                    raise ValueError(f"field {declared.name!r} is declared in two ways; rename one of them")

    def __getitem__(self, direction: Direction) -> Encoding:
        encoding = self.rowwise if direction is Direction.ROWWISE else self.columnwise
        if encoding is None:
            raise KeyError(f"the format has no {direction.value} encoding")
        return encoding

    def __contains__(self, direction: Direction) -> bool:
        return direction in self.directions

    @cached_property
    def directions(self) -> tuple[Direction, ...]:
        """The directions that are declared."""
        present = {Direction.ROWWISE: self.rowwise, Direction.COLUMNWISE: self.columnwise}
        return tuple(direction for direction, encoding in present.items() if encoding is not None)

    @cached_property
    def independent(self) -> tuple[Direction, ...]:
        """The directions, without one that stores the very fields of another."""
        row, col = self.rowwise, self.columnwise
        same = row is not None and col is not None and row.fields == col.fields
        return self.directions[:1] if same else self.directions

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """Distinct fields; one that both directions name is stored once."""
        return tuple({f.name: f for d in self.directions for f in self[d].fields}.values())

    def select(self, *directions: Direction) -> Format:
        """The part of this format that serves `directions`."""
        part = self._parts.get(directions)
        if part is None:
            part = self._parts[directions] = Format(**{d.value: self[d] for d in directions})
        return part

    @cached_property
    def _parts(self) -> dict[tuple[Direction, ...], Format]:
        """What `select` gave; itself for all that there is."""
        return {self.directions: self}

    @cached_property
    def columnwise_is_derivable(self) -> bool:
        """Whether both directions hold the same values, so that columnwise is a relayout of rowwise.

        Computed, not declared: equal codecs and pairwise equal tiles. A transform on one side makes codecs differ.
        """
        row, col = self.rowwise, self.columnwise
        return (
            row is not None
            and col is not None
            and row.codec == col.codec
            and len(row.fields) == len(col.fields)
            and all(a.tile == b.tile for a, b in zip(row.fields, col.fields, strict=True))
        )

    @cached_property
    def canonical(self) -> Format:
        """The smallest format from which this one can be rebuilt: what is sharded, sent and saved."""
        return self.select(Direction.ROWWISE) if self.columnwise_is_derivable else self

    def sufficient(self, present: Container[str]) -> tuple[Field, ...]:
        """The canonical fields, if all of them are among those `present`; else all that are."""
        canonical = self.canonical.fields
        is_whole = all(field.name in present for field in canonical)
        return canonical if is_whole else tuple(field for field in self.fields if field.name in present)

    def alignment(self, dim: int) -> int:
        """Logical `dim` may be cut at multiples of this only: 1 for most formats, as parts hold canonical fields."""
        part = self.canonical
        codecs = (part[d].codec for d in part.directions)
        return math.lcm(*(f.alignment(dim) for f in part.fields), *(codec.alignment(dim) for codec in codecs))

    def compact_bytes(self, region: Region) -> int:
        """Bytes of all fields of `region`, unpadded."""
        return sum(f.compact_bytes(region) for f in self.fields)

    def allocated_bytes(self, region: Region) -> int:
        """Bytes of all fields of `region` as allocated, padding included."""
        return sum(math.prod(f.shape(region)) * f.dtype.itemsize for f in self.fields)

    def renamed(self, prefix: str) -> Format:
        """The same format with `prefix` before every field name."""

        def rename(encoding: Encoding | None) -> Encoding | None:
            if encoding is None:
                return None
            return replace(encoding, fields=tuple(replace(f, name=prefix + f.name) for f in encoding.fields))

        return Format(rename(self.rowwise), rename(self.columnwise))
