"""Matrices that are hard to quantize, and buffers as fields of every order would hand them to a kernel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from te_dist import _C

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KINDS = ("normal", "wide", "extreme", "tiny", "zeros", "special", "ties")


def matrix(kind: str, shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A contiguous matrix of one `kind`, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator)
    choice = torch.rand(shape, generator=generator)
    info = torch.finfo(dtype)
    x = normal
    if kind == "wide":
        x = normal * torch.exp2(torch.randn(shape, generator=generator) * 12)
    elif kind == "extreme":
        x = torch.where(choice < 0.5, torch.tensor(info.max), torch.tensor(info.tiny))
        x = torch.where(choice < 0.9, x.copysign(normal), normal)
    elif kind == "tiny":  # below the smallest normal number, down to nothing
        x = normal * (info.tiny * 4) * torch.exp2(-12 * choice)
    elif kind == "zeros":  # of both signs, whole tiles of them
        x = torch.zeros(shape).copysign(normal)
        x[: shape[0] // 3] = normal[: shape[0] // 3]
    elif kind == "special":
        x = torch.where(choice < 0.002, torch.tensor(torch.nan), normal)
        x = torch.where((choice > 0.01) & (choice < 0.0105), torch.tensor(torch.inf).copysign(normal), x)
        x[shape[0] // 2 : shape[0] // 2 + 20] = torch.nan
    elif kind == "ties":  # half way between codes, where scales are powers of two
        x = torch.round(normal * 16) / 16 * 1.0625
    return x.to(dtype)


def scale_view(shape: tuple[int, int], dtype: torch.dtype, *, order: str) -> Tensor:
    """A logical view of `shape` into storage of either order, padded to multiples of four and poisoned."""
    outer, inner = shape if order == "mk" else shape[::-1]
    stored = torch.full((-(-outer // 4) * 4, -(-inner // 4) * 4), 77, dtype=dtype)
    view = stored[:outer, :inner]
    return view if order == "mk" else view.t()


def every_level() -> Iterator[str]:
    """Switches the kernels to each SIMD level of this CPU in turn, and back."""
    before = _C.simd_level()
    try:
        for level in _C.simd_levels():
            _C.set_simd_level(level)
            yield level
    finally:
        _C.set_simd_level(before)


def pack(codes: Tensor) -> Tensor:
    """Codes 0 to 15 (rows, cols) as bytes (rows, cols / 2), the even column in the low half."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous()
