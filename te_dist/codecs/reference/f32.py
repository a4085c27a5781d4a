"""Exact f32: division that is one, and constants by their bits."""

from __future__ import annotations

import torch
from torch import Tensor


def quotient(numerator: float | Tensor, denominator: float | Tensor) -> Tensor:
    """IEEE division, rounded once. `number / tensor` is none in torch: it multiplies by a rounded reciprocal."""
    n, d = (torch.as_tensor(t, dtype=torch.float32) for t in (numerator, denominator))
    return torch.div(*torch.broadcast_tensors(n, d))


def from_bits(bits: int) -> Tensor:
    """The f32 of these bits, as a tensor without dimensions."""
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)
