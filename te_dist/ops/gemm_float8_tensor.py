"""Product of two FP8 matrices with one fp32 scale each."""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.ops._checks import FP8, check_choice, check_dtype, check_packed, check_product, check_rows, extents, takes
from te_dist.ops._library import register

MULTIPLE = 16
_PAIRS = tuple((a, b) for a in FP8 for b in FP8 if (a, b) != ("e5m2", "e5m2"))


class Float8TensorProduct(TypedDict):
    """fp8: types of `a` and `b`, not both "e5m2".

    bias: (N,) of the type of `out`, bf16 or fp16, added before rounding; or None.  fast: leave all of a sum to the
    tensor cores, which keep 14 bits, instead of adding parts of it in fp32.  accumulate: add to what `out` holds, in
    fp32.  workspace: u8 (bytes,) that the product may use, at a multiple of 256 bytes; or None.
    """

    fp8: tuple[str, str]
    bias: Tensor | None
    fast: bool
    accumulate: bool
    workspace: Tensor | None


@takes(Float8TensorProduct)
def gemm_float8_tensor(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out: Tensor, **product: Unpack[Float8TensorProduct]
) -> None:
    """out (M, N) = a b^T, times both scales, by cuBLASLt.

    On CUDA only. N and K are multiples of 16; rows of `a`, `b` and `out` are multiples of 16 bytes long and apart, and
    scales begin at such multiples.

    Args:
        a: u8 codes (M, K), rows contiguous.
        a_scale: f32, one element.
        b: u8 codes (N, K), rows contiguous.
        b_scale: f32, one element.
        out: (M, N) fp32, bf16 or fp16, rows contiguous; fp32 to accumulate.
        product: see `Float8TensorProduct`.

    Raises:
        ValueError: a type, shape or address that does not fit.
        RuntimeError: cuBLASLt is not there, or multiplies no such matrices on this GPU.
        NotImplementedError: on another device than CUDA.
    """
    fp8, bias, workspace = product["fp8"], product["bias"], product["workspace"]
    fast, accumulate = product["fast"], product["accumulate"]
    check_choice("fp8", fp8, _PAIRS)
    (rows, depth), (cols, _) = extents("a", a), extents("b", b)
    check_rows("a", a, (torch.uint8,), (rows, depth))
    check_rows("b", b, (torch.uint8,), (cols, depth))
    check_product(out, (rows, cols), accumulate)
    if depth % MULTIPLE or cols % MULTIPLE:
        raise ValueError(
            f"a product of {rows} x {depth} by {depth} x {cols}: wanted multiples of {MULTIPLE} but for the first; pad "
            "with zeros"
        )
    for name, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
        check_packed(name, scale, (torch.float32,), scale.shape if scale.numel() == 1 else (1,))
    if bias is not None:
        check_dtype("out", out, (torch.bfloat16, torch.float16))
        check_packed("bias", bias, (out.dtype,), (cols,))
    if workspace is not None:
        check_packed("workspace", workspace, (torch.uint8,), (workspace.numel(),))
    torch.ops.te_dist.gemm_float8_tensor(a, a_scale, b, b_scale, fp8, bias, fast, accumulate, workspace, out)


register(
    "gemm_float8_tensor(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, str[] fp8, Tensor? bias, bool fast, "
    "bool accumulate, Tensor(a!)? workspace, Tensor(b!) out) -> ()",
    None,
    kernels.gemm_float8_tensor,
)
