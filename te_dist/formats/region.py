"""Where a (part of a) matrix lies in the whole it was cut from.

Scale tiles are anchored at the first row and column of the whole. A shard that knows where it starts therefore knows
which tiles it touches, also where a cut goes through one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from te_dist.formats.group import Group

WHOLE = 0  # grain or tile entry: one value covers the entire dimension
Pair = tuple[int, int]
_T = TypeVar("_T")
_P = TypeVar("_P", "Region", "Group")


def hashed_once(cls: type[_T]) -> type[_T]:
    """Class decorator of frozen dataclasses that are keys of caches: an instance computes its hash once.

    What is cached in an instance, its hash and cached properties, is not pickled: hashes of strings differ between
    processes.
    """
    compute = cls.__hash__
    names: tuple[str, ...] = tuple(cls.__dataclass_fields__)  # type: ignore[attr-defined]

    def hash_of(self: _T) -> int:
        found = self.__dict__.get("_hash")
        if found is None:
            found = self.__dict__["_hash"] = compute(self)
        return found

    def state_of(self: _T) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in names}

    cls.__hash__, cls.__getstate__ = hash_of, state_of  # type: ignore[method-assign,attr-defined]
    return cls


@dataclass(frozen=True)
class Span:
    """A run of one dimension: `start` in the whole, and its length (`len(span)`)."""

    start: int
    length: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.length < 0:
            raise ValueError(f"a span starts and extends at 0 or more, got start={self.start}, length={self.length}")

    def __len__(self) -> int:
        return self.length

    @property
    def stop(self) -> int:
        return self.start + self.length

    def blocks(self, block: int) -> Span:
        """The blocks of `block` elements that this span touches, counted from the start of the whole.

        A `WHOLE` block is always touched, also by an empty span: every shard holds a per-tensor value.
        """
        if block == WHOLE:
            return Span(0, 1)
        start = self.start // block
        return Span(start, -(-self.stop // block) - start if self.length else 0)

    def contains(self, part: Span) -> bool:
        return self.start <= part.start and part.stop <= self.stop


@hashed_once
@dataclass(frozen=True)
class Region:
    """A rectangle of the whole matrix. `Region.whole(m, k)` is a matrix that was not cut."""

    rows: Span
    cols: Span

    @staticmethod
    @lru_cache(maxsize=4096)
    def whole(m: int, k: int) -> Region:
        return Region(Span(0, m), Span(0, k))

    @cached_property
    def shape(self) -> Pair:
        """(rows, cols) of this region."""
        return len(self.rows), len(self.cols)

    @cached_property
    def origin(self) -> Pair:
        """(first row, first column) in the whole."""
        return self.rows.start, self.cols.start

    def blocks(self, block: Pair) -> tuple[Span, Span]:
        """The (row, col) blocks this region touches."""
        return self.rows.blocks(block[0]), self.cols.blocks(block[1])

    def phase(self, block: Pair) -> Pair:
        """Offset of the first (row, col) inside its block; (0, 0) where no cut goes through a block."""
        rows, cols = (0 if b == WHOLE else start % b for start, b in zip(self.origin, block, strict=True))
        return rows, cols

    def narrow(self, dim: int, start: int, length: int) -> Region:
        """The part `start` to `start + length` of this region along `dim` (0: rows, 1: cols)."""
        span = (self.rows, self.cols)[dim]
        part = Span(span.start + start, length)
        if not span.contains(part):
            raise ValueError(f"cannot narrow {span} to {part}: the part leaves the region")
        return Region(part, self.cols) if dim == 0 else Region(self.rows, part)

    def chunk(self, num_chunks: int, unit: int = 1) -> Chunks[Region]:
        """Row parts as `torch.chunk` cuts `len(rows) // unit` units, followed by empty ones up to `num_chunks`."""
        if len(self.rows) % unit:
            raise ValueError(f"{len(self.rows)} rows are no whole number of units of {unit} rows; cut whole units")
        return Chunks(self, 0, num_chunks, unit)


@hashed_once
@dataclass(frozen=True)
class Chunks(Sequence[_P]):
    """Parts as `torch.chunk` cuts a dimension, followed by empty ones; each is made when it is asked for.

    Attributes:
        whole: what is cut.
        dim: of it.
        num_chunks: of the parts.
        unit: indices that stay together.
    """

    whole: _P
    dim: int
    num_chunks: int
    unit: int = 1

    @cached_property
    def extent(self) -> int:
        """Of the dimension that is cut."""
        return self.whole.shape[self.dim]

    @cached_property
    def length(self) -> int:
        """Of every part but the last ones, which have less or nothing."""
        return -(-self.extent // (self.unit * self.num_chunks)) * self.unit

    def __len__(self) -> int:
        return self.num_chunks

    def __iter__(self) -> Iterator[_P]:
        return map(self.__getitem__, range(self.num_chunks))

    @overload
    def __getitem__(self, index: int) -> _P: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[_P, ...]: ...

    def __getitem__(self, index: int | slice) -> _P | tuple[_P, ...]:
        number = range(self.num_chunks)[index]
        if isinstance(number, range):
            return tuple(map(self.__getitem__, number))
        start, stop = (min(i * self.length, self.extent) for i in (number, number + 1))
        return self.whole.narrow(self.dim, start, stop - start)


@dataclass(frozen=True)
class Partition:
    """How a matrix is cut into a grid of parts: every distinct row span and every distinct column span."""

    rows: tuple[Span, ...]
    cols: tuple[Span, ...]

    @staticmethod
    def of(parts: Sequence[Region]) -> Partition:
        """The partition whose parts have these regions."""
        return Partition(tuple(dict.fromkeys(p.rows for p in parts)), tuple(dict.fromkeys(p.cols for p in parts)))
