"""Activations of `LayerNormMLP`, by TransformerEngine's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """A pointwise function; gated ones split the last dimension and multiply f(first half) by the second.

    Attributes:
        function: f.
        is_gated: whether the input is twice as wide as the output.
    """

    function: Callable[[Tensor], Tensor]
    is_gated: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        if not self.is_gated:
            return self.function(x)
        first, second = x.chunk(2, dim=-1)
        return self.function(first) * second


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _srelu(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS = {
    "gelu": Activation(_gelu),
    "geglu": Activation(_gelu, is_gated=True),
    "qgelu": Activation(_qgelu),
    "qgeglu": Activation(_qgelu, is_gated=True),
    "relu": Activation(F.relu),
    "reglu": Activation(F.relu, is_gated=True),
    "srelu": Activation(_srelu),
    "sreglu": Activation(_srelu, is_gated=True),
    "silu": Activation(F.silu),
    "swiglu": Activation(F.silu, is_gated=True),
}


def find(name: str) -> Activation:
    """The activation of that name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation is one of {sorted(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]
