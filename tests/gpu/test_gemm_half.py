"""Products of bf16 and fp16 by cuBLASLt: of whole numbers, whose sums are exact in any order."""

from __future__ import annotations

import pytest
import torch

from te_dist import ops
from te_dist.testing import assert_bitwise
from tests.gpu.twins import on_gpu
from tests.ops.half_products import SHAPES, SUMMED, operands, wanted

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("output", ["same", "fp32", "added"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("summed", SUMMED, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_values(shape, summed, dtype, output):
    a, b = operands(shape, summed, dtype)
    out = torch.full(shape[:2], 3.0, dtype=dtype if output == "same" else torch.float32, device="cuda")
    want = (wanted(a, b, summed) + (3.0 if output == "added" else 0.0)).to(out.dtype)
    ops.gemm_half(on_gpu(a), on_gpu(b), summed_dims=summed, accumulate=output == "added", out=out)
    assert_bitwise(out.cpu(), want, "out")


@pytest.mark.parametrize("num_bytes", [256, 1 << 20, 8 << 20])
def test_no_run_in_a_workspace_differs(num_bytes):
    a, b = (torch.randn(16384, cols, device="cuda", dtype=torch.bfloat16) for cols in (256, 512))
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    want, got = (torch.empty(256, 512, device="cuda") for _ in range(2))
    ops.gemm_half(a, b, summed_dims=(0, 0), workspace=workspace, out=want)
    torch.testing.assert_close(want.double(), a.double().t() @ b.double(), rtol=1e-3, atol=0.05)
    for _ in range(50):
        got.fill_(7.0)
        ops.gemm_half(a, b, summed_dims=(0, 0), workspace=workspace, out=got)
        assert_bitwise(got, want, "out")


def test_what_does_not_fit_is_refused():
    a, b = (on_gpu(x) for x in operands((16, 8, 32), (1, 1), torch.bfloat16))
    out = torch.empty(16, 8, dtype=torch.bfloat16, device="cuda")
    for changes, words in (
        ({"summed_dims": (2, 1)}, "summed_dims"),
        ({"summed_dims": (1, 0)}, "b: "),
        ({"b": b.half()}, "b: "),
        ({"a": a.float()}, "a: "),
        ({"a": a[:1].expand(16, 32)}, "a: got strides"),
        ({"out": out.half()}, "out: got torch.float16"),
        ({"out": out[:, :4]}, "out: "),
        ({"workspace": torch.empty(257, dtype=torch.uint8, device="cuda")[1:]}, "workspace: got address"),
        ({"accumulate": True}, "out: got torch.bfloat16, wanted torch.float32"),
    ):
        given = {"a": a, "b": b, "summed_dims": (1, 1), "out": out} | changes
        with pytest.raises(ValueError, match=words):
            ops.gemm_half(given.pop("a"), given.pop("b"), **given)
