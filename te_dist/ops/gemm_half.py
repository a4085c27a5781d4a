"""Product of two bf16 or fp16 matrices, summed in fp32, each as it lies in memory."""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.ops._checks import check_choice, check_packed, check_product, check_rows, extents, takes
from te_dist.ops._library import register
from te_dist.ops.grouped_gemm_half import HALVES


class HalfProduct(TypedDict, total=False):
    """accumulate: add to what `out` holds, in fp32.  workspace: u8 (bytes,) that the product may use, at a multiple of
    256 bytes; or None.
    """

    accumulate: bool
    workspace: Tensor | None


@takes(HalfProduct)
def gemm_half(
    a: Tensor, b: Tensor, *, summed_dims: tuple[int, int], out: Tensor, **product: Unpack[HalfProduct]
) -> None:
    """out (M, N) = a b^T, by cuBLASLt, which is asked once how it multiplies matrices of a shape, pitch and alignment.

    On CUDA only. Rows may lie apart, but not in one another.

    Args:
        a: bf16 or fp16 (M, K), rows contiguous; (K, M) where its summed dimension is 0.
        b: of the type of `a`, (N, K), rows contiguous; (K, N) where its summed dimension is 0.
        summed_dims: which dimension of `a`, and of `b`, the product sums over.
        out: (M, N) in the type of `a`, or fp32, rows contiguous; fp32 to accumulate.
        product: see `HalfProduct`.

    Raises:
        ValueError: a type, shape, stride or address that does not fit.
        RuntimeError: cuBLASLt is not there, or multiplies no such matrices on this GPU.
        NotImplementedError: on another device than CUDA.
    """
    accumulate, workspace = product.get("accumulate", False), product.get("workspace")
    check_choice("summed_dims", summed_dims, ((1, 1), (1, 0), (0, 1), (0, 0)))
    of_a, of_b = extents("a", a), extents("b", b)
    rows, cols, depth = of_a[1 - summed_dims[0]], of_b[1 - summed_dims[1]], of_a[summed_dims[0]]
    check_rows("a", a, HALVES, of_a)
    check_rows("b", b, (a.dtype,), (cols, depth) if summed_dims[1] else (depth, cols))
    check_product(out, (rows, cols), accumulate)
    for name, matrix in (("a", a), ("b", b), ("out", out)):
        if matrix.shape[0] > 1 and matrix.stride(0) < matrix.shape[1]:
            raise ValueError(f"{name}: got strides {matrix.stride()}, wanted rows apart; call .contiguous()")
    if out.dtype not in (a.dtype, torch.float32):
        raise ValueError(f"out: got {out.dtype}, wanted {a.dtype} or torch.float32")
    if workspace is not None:
        check_packed("workspace", workspace, (torch.uint8,), (workspace.numel(),))
    torch.ops.te_dist.gemm_half(a, b, summed_dims, accumulate, workspace, out)


register(
    "gemm_half(Tensor a, Tensor b, int[] summed_dims, bool accumulate, Tensor(a!)? workspace, Tensor(b!) out) -> ()",
    None,
    kernels.gemm_half,
)
