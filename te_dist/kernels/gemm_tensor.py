"""Launches of products by cuBLASLt, of FP8 matrices with one scale each and of bf16 and fp16: nothing is compiled."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from te_dist import _C
from te_dist.kernels.arguments import pointer
from te_dist.kernels.gemm import check_alignment, is_trivial
from te_dist.kernels.runtime import ALIGNMENT, Launch, issue
from te_dist.kernels.spec import Layout

_LAYOUT = Layout(_C.cuda.Product.PARAMETERS)
_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
SCALE_ALIGNMENT = 16  # bytes of which addresses of scales are multiples
WORKSPACE_ALIGNMENT = 256  # the same, of workspaces
_ONE_BLOCK = (1, 1, 1)  # in the place of a grid, which cuBLASLt chooses


@cache
def _library() -> str:
    """Name of the cuBLASLt that torch has loaded."""
    assert torch.version.cuda is not None  # there are no CUDA tensors without
    return f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}"


@lru_cache(maxsize=4096)  # numbers of rows may be others in every step
def _product(
    device: int,
    places: tuple[tuple[int, int, int], tuple[int, int, int]],
    types: tuple[str, ...],
    alignments: tuple[int, ...],
    how: tuple[bool, bool, int, tuple[bool, bool]],
) -> _C.cuda.Product:
    """With the algorithm that cuBLASLt takes for the fastest.

    Args:
        places: (M, N, K), and the elements from row to row of `a`, `b` and `out`.
        types: names, of `a`, `b`, `out` and the bias; "" for none.
        alignments: of their addresses, in bytes.
        how: fast, accumulate, bytes of a workspace, which of `a` and `b` lie as (K, M) and (K, N).
    """
    keywords = dict[str, Any](zip(("fast", "accumulate", "workspace_bytes", "turned"), how, strict=True))
    return _C.cuda.Product(_library(), device, *places, types, alignments, **keywords)


def _alignment(address: int) -> int:
    """The largest power of two that divides an address, as far as launches at other addresses share it."""
    return address & -address & (ALIGNMENT - 1) or ALIGNMENT


def _pitch(matrix: Tensor) -> int:
    """Elements from row to row; that of a single row means nothing."""
    return matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]


def _workspace(given: Tensor | None) -> tuple[int, int]:
    """Address and bytes."""
    if given is None:
        return 0, 0
    if given.data_ptr() % WORKSPACE_ALIGNMENT:
        raise ValueError(
            f"workspace: got address {given.data_ptr():#x}, wanted a multiple of {WORKSPACE_ALIGNMENT}; begin it there"
        )
    return given.data_ptr(), given.numel()


def gemm_float8_tensor(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *rest: Any) -> None:
    """See te_dist.ops.gemm_float8_tensor."""
    fp8, bias, fast, accumulate, workspace, out = rest
    (rows, depth), cols = a.shape, b.shape[0]
    if is_trivial(depth, out, bias=bias, accumulate=accumulate):
        return
    check_alignment(a=a, b=b, out=out)
    if out.is_meta:
        return
    for name, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
        if scale.data_ptr() % SCALE_ALIGNMENT:
            raise ValueError(
                f"{name}: got address {scale.data_ptr():#x}, wanted a multiple of {SCALE_ALIGNMENT}, which cuBLASLt "
                "reads; copy the scale"
            )
    types = (*fp8, _TYPES[out.dtype], "" if bias is None else _TYPES[bias.dtype])
    addresses = a.data_ptr(), b.data_ptr(), out.data_ptr(), pointer(bias)
    pitches = _pitch(a), _pitch(b), _pitch(out)
    place, num_bytes = _workspace(workspace)
    how = fast, accumulate, num_bytes, (False, False)
    device = out.get_device()
    product = _product(device, ((rows, cols, depth), pitches), types, tuple(map(_alignment, addresses)), how)
    scales = a_scale.data_ptr(), b_scale.data_ptr()
    values = (addresses[0], scales[0], addresses[1], scales[1], addresses[3], place, addresses[2])
    issue(Launch(product, device, _ONE_BLOCK, _LAYOUT, values))


def gemm_half(a: Tensor, b: Tensor, summed_dims: tuple[int, int], *rest: Any) -> None:
    """See te_dist.ops.gemm_half."""
    accumulate, workspace, out = rest
    depth = a.shape[summed_dims[0]]
    if is_trivial(depth, out, bias=None, accumulate=accumulate) or out.is_meta:
        return
    rows, cols = out.shape
    types = (_TYPES[a.dtype], _TYPES[b.dtype], _TYPES[out.dtype], "")
    addresses = a.data_ptr(), b.data_ptr(), out.data_ptr(), 0
    place, num_bytes = _workspace(workspace)
    how = False, accumulate, num_bytes, tuple(dim == 0 for dim in summed_dims)
    places, alignments = ((rows, cols, depth), (_pitch(a), _pitch(b), _pitch(out))), tuple(map(_alignment, addresses))
    device = out.get_device()
    product = _product(device, places, types, alignments, how)
    values = (addresses[0], 0, addresses[1], 0, 0, place, addresses[2])
    issue(Launch(product, device, _ONE_BLOCK, _LAYOUT, values))
