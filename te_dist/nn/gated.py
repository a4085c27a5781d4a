"""Two linear maps with an activation between them."""

from __future__ import annotations

from torch import Tensor

from te_dist._torch_private import is_watched
from te_dist.nn import activations
from te_dist.nn.fronts import FRONTS
from te_dist.nn.site import LinearSite

Map = tuple[LinearSite, Tensor, Tensor | None]  # a map, its weight and its bias


def in_turn(first: Map, second: Map, x: Tensor, *, activation: str) -> Tensor:
    """`f(x W1^T + b1) W2^T + b2`. Where f is among `FRONTS` it is computed on the way into the quantizer of the second
    map, and its gradient on the way into that of the first, unless hooks see what is between them.
    """
    (fc1, *of_first), (fc2, *of_second) = first, second
    if activation not in FRONTS or fc2.is_hooked:
        return fc2(activations.find(activation)(fc1(x, *of_first)), *of_second)
    hidden, values = (fc1(x, *of_first), None) if is_watched(fc2) else fc1.hand(x, *of_first, to=activation)
    return fc2(hidden, *of_second, front=activation, values=values)
