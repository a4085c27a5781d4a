"""What kernels read their matrix from: the sources of csrc/cuda/common/source.cuh, and tensors as their parameters.

Ops name a source by the tensor `x` that it reads, its name and the tensors beside it; see te_dist.ops.source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from torch import Tensor

from te_dist.formats.region import Pair
from te_dist.kernels.arguments import ELEMENTS, INTEGERS, PANEL, access_bytes
from te_dist.kernels.spec import Layout

GATHERED = "gathered "  # in front of the name of a source whose rows are gathered; the index is last beside it
_ROUTED = {
    "kNone": "",
    "kWeighted": "probability:P",
    "kDifferentiated": "probability:P row_sums:P rows:q",
}  # fields of each
_WIDTH = 16  # bytes that can be read at a time, at most


@dataclass(frozen=True)
class Source:
    """A source before it is given tensors.

    Attributes:
        template: its type, as C++.
        fields: of its `Params`, as a `Layout` has them.
        pair: the same, whose panels of both halves of the columns are read together; None where there is none.
        is_pair: whether this is such a one.
    """

    template: str
    fields: str
    pair: Source | None = None
    is_pair: bool = False


class Input(NamedTuple):
    """A source with its tensors: the matrix that a kernel reads.

    Attributes:
        tensor: the one it is computed from, or is.
        source: how.
        shape: (rows, cols) of the matrix.
        values: of the fields of the source.
        widest: bytes that can be read at a time from columns that are multiples of as many bytes.
    """

    tensor: Tensor
    source: Source
    shape: Pair
    values: tuple[int, ...]
    widest: int

    def numel(self) -> int:
        """Number of elements."""
        return self.shape[0] * self.shape[1]

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.tensor.element_size()

    @property
    def walked(self) -> Pair:
        """(rows, cols) that a kernel goes over, a panel at a time: half the columns where it reads pairs."""
        rows, cols = self.shape
        return rows, cols // 2 if self.source.is_pair else cols

    def in_pairs(self, col: int = 0) -> Input:
        """The same read in pairs, where it can be: halves are whole panels, which begin `col` before the matrix."""
        pair = self.source.pair
        is_whole = not col and self.numel() > 0 and self.shape[1] % (2 * PANEL[1]) == 0 and self.widest == _WIDTH
        return self._replace(source=pair) if pair is not None and is_whole else self

    @property
    def is_plain(self) -> bool:
        """Whether it lies in memory as it is, and nothing is found on the way."""
        return self.source is plain(ELEMENTS[self.tensor.dtype])

    def load_bytes(self, col: int = 0) -> int:
        """Bytes that can be read at a time where panels begin `col` columns before the matrix."""
        return access_bytes(self.widest, col * self.tensor.element_size())


@cache
def plain(element: str) -> Source:
    """Elements as they lie in memory."""
    return Source(f"Plain<{element}>", "x:P")


@cache
def swiglu(element: str, routing: str = "kNone") -> Source:
    """silu(gate) * up. `routing`: what rows are multiplied by, as C++."""
    return Source(f"SwiGlu<{element}, Routing::{routing}>", f"{_ROUTED[routing]} x:P")


@cache
def swiglu_gradient(element: str, routing: str = "kNone") -> Source:
    """The gradient of that by gate and up; `kDifferentiated`: and by what rows are multiplied by."""
    of, fields = f"SwiGluGradient<{element}, Routing::{routing}", f"{_ROUTED[routing]} x:P grad:P"
    fits = element == "BFloat16"  # pairs of others take more registers than there are
    return Source(f"{of}>", fields, Source(f"{of}, true>", fields, is_pair=True) if fits else None)


@cache
def rms_norm(element: str, gamma: str, zero_centered: str) -> Source:
    """x * rstd * gamma. `zero_centered`: "true" or "false"."""
    return Source(f"RmsNorm<{element}, {gamma}, {zero_centered}>", "x:P rstd:P gamma:P")


@cache
def gathered(source: Source, index: str) -> Source:
    """Rows of the same source, by numbers of that type."""
    return Source(f"Gathered<{source.template}, {index}>", f"{_within(source)} index:P rows:q")


@cache
def summed(source: Source) -> Source:
    """The same source, whose columns are summed on the way."""
    return Source(f"Summed<{source.template}>", f"{_within(source)} sums:P")


@cache
def adam(grad: str, value: str) -> Source:
    """Values of one element type, updated by gradients of another on the way (csrc/cuda/adam.cuh)."""
    return Source(f"Adam<{grad}, {value}>", "value:P exp_avg:P exp_avg_sq:P grad:P factors:P")


@cache
def layout(source: Source, rest: str) -> Layout:
    """Of the parameters of a kernel: those of the source, and the `rest`."""
    return Layout(f"{_within(source)} {rest}")


def _within(source: Source) -> str:
    """Fields of a source that is a part of something."""
    return " ".join(f"source.{field}" for field in source.fields.split())


def read(
    x: Tensor, name: str, beside: Sequence[Tensor], sums: Tensor | None = None, row_sums: Tensor | None = None
) -> Input:
    """The source of that name. `sums`, `row_sums`: where those of its columns and rows go, one row for each panel."""
    if name.startswith(GATHERED):
        of = _gathered(x, name, beside)
    else:
        of = _in_order(x, name, beside, row_sums if row_sums is not None and row_sums.numel() else None)
    if sums is None or not sums.numel():
        return of
    return Input(x, summed(of.source), of.shape, (*of.values, sums.data_ptr()), of.widest)


def _gathered(x: Tensor, name: str, beside: Sequence[Tensor]) -> Input:
    *others, index = beside
    of = _in_order(x, name.removeprefix(GATHERED), others)
    rows, cols = of.shape
    source, values = gathered(of.source, INTEGERS[index.dtype]), (*of.values, index.data_ptr(), rows)
    return Input(x, source, (index.shape[0], cols), values, of.widest)


def _in_order(x: Tensor, name: str, beside: Sequence[Tensor], row_sums: Tensor | None = None) -> Input:
    if "swiglu" in name:
        return _swiglu(x, name, beside, row_sums)
    element, size = ELEMENTS[x.dtype], x.element_size()
    positions = [x.data_ptr(), x.shape[1] * size]
    if name == "plain":
        source = plain(element)
    else:
        gamma = beside[1]
        source = rms_norm(element, ELEMENTS[gamma.dtype], "true" if name == "zero_centered_rms_norm" else "false")
        positions.append(_as_columns(gamma, size))
    values = (x.data_ptr(), *(tensor.data_ptr() for tensor in beside))
    rows, cols = x.shape
    return Input(x, source, (rows, cols), values, access_bytes(_WIDTH, *positions))


def _swiglu(x: Tensor, name: str, beside: Sequence[Tensor], row_sums: Tensor | None) -> Input:
    is_weighted, is_gradient = name.startswith("weighted"), name.endswith("gradient")
    rows, cols = x.shape
    half = cols // 2
    matrices = [tensor.data_ptr() for tensor in (x, *beside[:is_gradient])]
    vectors = [tensor.data_ptr() for tensor in beside[is_gradient:]]
    routing = ("kWeighted" if row_sums is None else "kDifferentiated") if is_weighted else "kNone"
    source = (swiglu_gradient if is_gradient else swiglu)(ELEMENTS[x.dtype], routing)
    widest = access_bytes(_WIDTH, *matrices, half * x.element_size())
    found = () if row_sums is None else (row_sums.data_ptr(), rows)
    return Input(x, source, (rows, cols if is_gradient else half), (*vectors, *found, *matrices), widest)


def _as_columns(vector: Tensor, size: int) -> int:
    """A position in bytes of elements of `size` that allows as many elements at a time as the vector's address does."""
    return access_bytes(_WIDTH, vector.data_ptr()) // vector.element_size() * size
