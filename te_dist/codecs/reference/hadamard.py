"""The random Hadamard transform that spreads outliers before NVFP4 quantization."""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH = 16
_STRIDES = (1, 2, 4, 8)


def hadamard(x: Tensor, sign_mask: int) -> Tensor:
    """`x` (m, k) bf16, transformed along M in groups of 16 rows; bf16.

    Within a group y_j is the sum over i of sign_i x_i H_ij / 4 with H_ij = (-1)^popcount(i & j); sign_i is -1 where bit
    i of `sign_mask` is set. The sum is a butterfly in f32: signs first, then for strides 1, 2, 4, 8 every pair of rows
    (i, i + stride) with that bit of i clear becomes (sum, difference); the result times 0.25 is rounded to bf16 once.
    """
    m, k = x.shape
    if x.dtype != torch.bfloat16 or m % WIDTH:
        raise ValueError(f"hadamard takes bfloat16 and a multiple of {WIDTH} rows, got {x.dtype} and {m} rows")
    signs = torch.tensor([-1.0 if sign_mask >> i & 1 else 1.0 for i in range(WIDTH)])
    values = x.float().reshape(m // WIDTH, WIDTH, k) * signs[:, None]
    for stride in _STRIDES:
        first, second = values.reshape(m // WIDTH, WIDTH // (2 * stride), 2, stride, k).unbind(2)
        values = torch.stack((first + second, first - second), 2)
    return (values * 0.25).reshape(m, k).bfloat16()
