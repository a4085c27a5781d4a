"""Two linear maps with an activation between them."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist.nn import activations
from te_dist.nn.fronts import FRONTS, hands_over
from te_dist.nn.site import LinearSite
from te_dist.tensor import QuantizedTensor

Map = tuple[LinearSite, Tensor, Tensor | None]  # a map, its weight and its bias


def in_turn(first: Map, second: Map, x: Tensor, *, activation: str) -> Tensor:
    """`f(x W1^T + b1) W2^T + b2`. Where f is among `FRONTS` it is computed on the way into the quantizer of the second
    map, and its gradient on the way into that of the first, see [Note: Fronts of the map behind].
    """
    (fc1, *of_first), (fc2, *of_second) = first, second
    if activation not in FRONTS or fc2.is_hooked:
        return fc2(activations.find(activation)(fc1(x, *of_first)), *of_second)
    keeps = isinstance(x, QuantizedTensor) or fc1.placed is not None or torch.compiler.is_compiling()
    if keeps or not hands_over(fc1, fc2, LinearSite):
        return fc2(fc1(x, *of_first), *of_second, front=activation)
    hidden, values = fc1(x, *of_first, hands_to=activation)
    return fc2(hidden, *of_second, front=activation, values=values)
