"""Clipping by norm on CUDA: the CPU's norm, and nothing that the host waits for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from te_dist import optim
from tests.gpu.waits import never_waiting

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_host_does_not_wait(dtype: torch.dtype) -> None:
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype, device="cuda")) for shape in ((33, 7), (128, 64), ())]
    for seed, param in enumerate(params):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)
    want = torch.cat([param.grad.double().flatten() for param in params]).norm()
    torch.cuda.synchronize()
    with never_waiting():
        got = optim.clip_grad_norm_(params, 0.5)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
    after = torch.cat([param.grad.double().flatten() for param in params]).norm()
    torch.testing.assert_close(after, torch.full_like(after, 0.5), rtol=4e-3, atol=0)
