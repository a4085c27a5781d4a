"""Memory of the caller that results of products are written into."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist.tensor import QuantizedTensor


def check_buffer(name: str, buffer: Tensor, x: Tensor, *, cols: int) -> None:
    """Raises ValueError unless `buffer` can take `cols` columns for each row of `x`; `name`: of the argument."""
    wanted = (x.shape[0], cols), x.dtype, x.device
    if (buffer.shape, buffer.dtype, buffer.device) != wanted or not buffer.is_contiguous() or buffer.requires_grad:
        raise ValueError(
            f"{name}: got {buffer.dtype} of {tuple(buffer.shape)} on {buffer.device}, strides {buffer.stride()}, "
            f"requires_grad={buffer.requires_grad}; wanted {wanted[1]} of {wanted[0]} on {wanted[2]}, contiguous, "
            "without requires_grad"
        )
    if name == "out" and not torch.compiler.is_compiling() and overlap(buffer, x):
        raise ValueError("out: got memory of the input, which is read while out is written, and again in backward")


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors have memory in common; gaps between elements count as theirs."""
    if isinstance(b, QuantizedTensor) or not a.numel() or not b.numel() or a.is_meta:
        return False
    ends = [
        t.data_ptr() + t.element_size() * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))
        for t in (a, b)
    ]
    return a.data_ptr() < ends[1] and b.data_ptr() < ends[0]
