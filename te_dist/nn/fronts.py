"""What linear maps compute of an input on its way into the quantizer, and of its gradient on the way back.

[Note: Fronts of the map behind]
What a map's front computes has its gradient found in that map's backward pass, and written, for the map in front to
read and quantize. Where the map in front is told of it (`hands_to`), its own backward pass finds that gradient on the
way into its quantizer instead, and nothing is written between, if that reads what it quantizes once. It returns two
tensors then: the rows, which the map behind reads and which have no gradient; and one that stands for the values the
front makes of them, to which the map behind returns the gradient of its input (`values`). Nobody reads that one: it has
the shape of those values, and memory of the rows. Bits are the same, since a quantizer does with a source what it does
with values. Rows are let go before the products of backward, where torch's Functions can let go. Hooks would see
neither: maps that hooks watch do not hand over, nor such as are compiled or wrapped on their own (`hands_over`), nor
dense ones in graphs. What runs again in backward does what it did, whatever hooks there are by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import torch
from torch import Tensor

from te_dist._torch_private import in_backward, is_watched
from te_dist.ops.source import Source, SwiGlu, SwiGluGradient

if TYPE_CHECKING:
    from te_dist.nn.site import LinearSite


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


def hands_over(first: LinearSite, second: LinearSite, kind: type[LinearSite]) -> bool:
    """Whether a map hands rows to the next, both of them sites of this `kind`. See [Note: Fronts of the map behind].

    Asked once in every pass, before the first of them is called.
    """
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and in_backward():
        return getattr(first, "handed", False)
    hands = all([type(each) is kind and not is_watched(each) for each in (first, second)])
    if not is_compiling:
        first.handed = hands
    return hands
