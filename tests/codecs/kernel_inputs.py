"""Matrices that are hard to quantize, and buffers as fields of every order would hand them to a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from te_dist import _C, ops
from te_dist.ops.quantize_float8_current import WORKSPACE

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
        x = torch.where(choice < 0.002, torch.tensor(torch.nan).copysign(normal), normal)
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


def quantizers(x: Tensor, noop: Tensor | None) -> Iterator[tuple[str, Callable[[], None], dict[str, Tensor]]]:
    """Every quantize op over `x`, whose extents are multiples of 128, with a flag: name, call, outputs."""
    rows, cols = x.shape

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    f32, fp8 = torch.float32, dict(fp8="e4m3", noop=noop)
    codes = dict(row_data=empty(rows, cols), col_data=empty(cols, rows))
    outputs = codes | dict(row_scale=empty(1, 1, dtype=f32), col_scale=empty(1, 1, dtype=f32))
    workspace = empty(*WORKSPACE, dtype=f32)
    rule = fp8 | dict(pow2=False, eps=0.0)
    current = lambda o=outputs: ops.quantize_float8_current(x, **rule, workspace=workspace, **o)  # noqa: E731
    yield "current", current, outputs
    outputs = outputs | dict(amax=empty(1, dtype=f32))
    scale = torch.full((1,), 3.0, device=x.device)
    yield "known", lambda o=outputs: ops.quantize_float8_tensor(x, scale, **fp8, **o), outputs
    outputs = codes | dict(row_scale=empty(rows, cols // 128, dtype=f32), col_scale=empty(rows // 128, cols, dtype=f32))
    rule = rule | dict(phase=(0, 0), row_tile=(1, 128), col_tile=(128, 1))
    yield "block", lambda o=outputs, r=rule: ops.quantize_float8_block(x, **r, **o), outputs
    outputs = dict(row_data=codes["row_data"], row_scale=empty(rows, cols // 32))
    outputs |= dict(col_data=empty(rows, cols), col_scale=empty(rows // 32, cols))
    rule = fp8 | dict(phase=(0, 0), row_tile=(1, 32), col_tile=(32, 1))
    yield "mx", lambda o=outputs, r=rule: ops.quantize_mxfp8(x, **r, **o), outputs
    outputs = dict(row_data=empty(rows, cols // 2), row_scale=empty(rows, cols // 16))
    outputs |= dict(col_data=empty(cols, rows // 2), col_scale=empty(rows // 16, cols))
    rule = dict(phase=(0, 0), e4m3_max=448, four_over_six="none", rng_state=None, noop=noop)
    rule |= dict(row_tile=(1, 16), col_tile=(16, 1))
    rule |= {f"{side}_tensor_amax": torch.ones(1, 1, device=x.device) * 5 for side in ("row", "col")}
    yield "nvfp4", lambda o=outputs, r=rule: ops.quantize_nvfp4(x, **r, **o), outputs


def check_noop(device: str) -> None:
    """A flag with any bit set leaves all outputs as they are; one without leaves none."""
    x = matrix("normal", (128, 256), torch.bfloat16).to(device)
    for flag in (torch.tensor([1.0]), torch.tensor(1, dtype=torch.int32), torch.tensor([-(2**31)], dtype=torch.int32)):
        for noop in (flag.to(device), torch.zeros_like(flag, device=device)):
            for name, call, outputs in quantizers(x, noop):
                for tensor in outputs.values():
                    tensor.fill_(1)
                call()
                for key, tensor in outputs.items():
                    assert bool((tensor == 1).all()) == bool(noop.any()), f"{key} of {name}, {noop}"
