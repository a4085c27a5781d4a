"""From the largest magnitude of a tensor to its scale, where that is a handful of values and not a kernel's work."""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}  # largest finite value of each 8-bit type


def scale_from_amax(amax: Tensor, *, fp8: str, pow2: bool, eps: float) -> Tensor:
    """The multiplier that maps `amax` (fp32, any shape) to the largest value of `fp8`.

    In order: amax is raised to `eps`; a zero, infinite or NaN amax gives 1; the IEEE quotient; FLT_MAX where that
    overflows; with `pow2` the mantissa is dropped, which rounds down to a power of two.
    """
    largest = torch.finfo(torch.float32).max
    amax = torch.where(amax < eps, torch.full_like(amax, eps), amax)
    usable = torch.isfinite(amax) & (amax != 0)
    # NOTE: a Python number over a tensor is a reciprocal and a product in torch; two tensors are divided.
    scale = torch.full_like(amax, FP8_MAX[fp8]) / amax
    scale = torch.where(torch.isinf(scale), torch.full_like(scale, largest), scale)
    if pow2:
        scale = (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    return torch.where(usable, scale, torch.ones_like(scale))
