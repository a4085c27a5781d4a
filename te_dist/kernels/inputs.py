"""What kernels read their matrix from: the sources of csrc/cuda/common/source.cuh."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from te_dist.kernels.spec import Layout


@dataclass(frozen=True)
class Source:
    """A source before it is given tensors.

    Attributes:
        template: its type, as C++.
        fields: of its `Params`, as a `Layout` has them.
    """

    template: str
    fields: str


@cache
def plain(element: str) -> Source:
    """Elements as they lie in memory."""
    return Source(f"Plain<{element}>", "x:P")


@cache
def adam(grad: str, value: str) -> Source:
    """Values of one element type, updated by gradients of another on the way (csrc/cuda/adam.cuh)."""
    return Source(f"Adam<{grad}, {value}>", "value:P exp_avg:P exp_avg_sq:P grad:P factors:P")


@cache
def layout(source: Source, rest: str) -> Layout:
    """Of the parameters of a kernel: those of the source, and the `rest`."""
    return Layout(" ".join(f"source.{field}" for field in source.fields.split()) + " " + rest)
