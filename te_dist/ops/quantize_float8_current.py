"""FP8 with one scale for the whole tensor, which follows from its amax."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.ops._checks import FP8, check_choice, check_output, takes
from te_dist.ops._library import register
from te_dist.ops._noop import check_noop, is_set
from te_dist.ops._planes import TENSOR_OUTPUTS, TensorPlanes, check_scalar, check_tensor_planes
from te_dist.ops.panel_sums import find_sums
from te_dist.ops.quantize_float8_tensor import cast
from te_dist.ops.source import Source, check_source, flat_source

FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}  # largest finite value of each 8-bit type
WORKSPACE = (512,)  # of kernels that run one behind the other: a shape


@takes(TensorPlanes)
def quantize_float8_current(  # noqa: PLR0913  (an op's signature is its schema)
    x: Tensor | Source,
    *,
    fp8: str,
    pow2: bool,
    eps: float,
    amax: Tensor | None = None,
    workspace: Tensor | None = None,
    noop: Tensor | None = None,
    **planes: Unpack[TensorPlanes],
) -> None:
    """Finds the amax and from it the scale, stores its inverse and casts; both directions together.

    In order: the amax is raised to `eps`; a zero, infinite or NaN amax gives 1; the IEEE quotient; FLT_MAX where that
    overflows; with `pow2` the mantissa is dropped, which rounds down to a power of two.

    Args:
        x: (rows, cols), fp32, bf16 or fp16; or a source.
        fp8: "e4m3" or "e5m2".
        pow2: round the scale down to a power of two.
        eps: lower bound of the amax.
        amax: f32, one element, replaces the amax that the kernel would find.
        workspace: f32, `WORKSPACE`; what is in it before and after means nothing. Needed where `amax` is None.
        noop: int32 or fp32, one element on the device of `x`: nothing is written where any of its bits is set.
        planes: row_data (rows, cols), col_data (cols, rows), and the inverse of the scale for each.
    """
    check_source(x)
    check_choice("fp8", fp8, FP8)
    check_scalar("amax", amax)
    if amax is None:
        if workspace is None:
            raise ValueError(f"workspace: got None without an amax, wanted f32 of shape {WORKSPACE}; allocate one")
        check_output("workspace", workspace.view(1, -1), torch.float32, (1, *WORKSPACE))
    check_noop(noop, x)
    check_tensor_planes(planes, x)
    outputs = map(planes.get, TENSOR_OUTPUTS)
    torch.ops.te_dist.quantize_float8_current(*flat_source(x), fp8, pow2, eps, amax, workspace, *outputs, noop)


def scale_of(amax: Tensor, fp8: str, pow2: bool, eps: float) -> Tensor:
    """As scale_from_amax of csrc/numerics, of every element."""
    largest = torch.finfo(torch.float32).max
    amax = torch.where(amax < eps, torch.full_like(amax, eps), amax)
    usable = torch.isfinite(amax) & (amax != 0)
    # NOTE: a Python number over a tensor is a reciprocal and a product in torch; two tensors are divided.
    scale = torch.full_like(amax, FP8_MAX[fp8]) / amax
    scale = torch.where(torch.isinf(scale), torch.full_like(scale, largest), scale)
    if pow2:
        scale = (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    return torch.where(usable, scale, torch.ones_like(scale))


def _cpu(
    x: Tensor, source: str, beside: list[Tensor], sums: Tensor | None, row_sums: Tensor | None, *rest: Any
) -> None:
    fp8, pow2, eps, amax, _, *outputs, noop = rest
    if is_set(noop):
        return
    read = (x, source, beside)
    if amax is None:
        amax = torch.empty(1, dtype=torch.float32)
        _C.tile_amax(read, (0, 0), (0, 0), amax, torch.get_num_threads())
    find_sums(read, sums, row_sums)
    cast(read, scale_of(amax.view(1), fp8, pow2, eps), fp8, *outputs)


register(
    "quantize_float8_current(Tensor x, str source, Tensor[] beside, Tensor(s!)? panel_sums, Tensor(t!)? row_sums, "
    "str fp8, bool pow2, float eps, Tensor? amax, Tensor(a!)? workspace, "
    "Tensor(b!)? row_data, Tensor(c!)? row_scale, Tensor(d!)? col_data, Tensor(e!)? col_scale, Tensor? noop) -> ()",
    _cpu,
    kernels.quantize_float8_current,
)
