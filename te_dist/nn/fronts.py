"""What linear maps compute of an input on its way into the quantizer, and of its gradient on the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypedDict

from torch import Tensor

from te_dist.ops.source import Source, SwiGlu, SwiGluGradient


class Front(NamedTuple):
    """What is computed of an input on its way into the quantizer.

    Attributes:
        source: of the input, a matrix.
        gradient: the gradient by the input, of it and of that by the source's values.
        widens: columns of the input for a column of the source.
    """

    source: Callable[[Tensor], Source]
    gradient: Callable[[Tensor, Tensor], Source]
    widens: int


FRONTS = {"swiglu": Front(SwiGlu, SwiGluGradient, 2)}  # "" for none


class Fronts(TypedDict, total=False):
    """Keywords of a linear map; names are those of `FRONTS`. See [Note: Fronts of the map behind].

    front: what of the input, which is plain then, is multiplied.
    hands_to: what the map that reads the output has in front, whose gradient is found here. The output comes with a
        tensor that stands for the values of that front.
    values: that tensor, of the map behind.
    """

    front: str
    hands_to: str
    values: Tensor | None
