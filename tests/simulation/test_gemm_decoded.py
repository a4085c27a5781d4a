"""Products of values with codes that are decoded wherever they lie, simulated, against float64."""

from __future__ import annotations

import pytest
import torch

from te_dist import ops
from te_dist.ops.gemm_decoded import Coded
from tests.ops.grouped_decoded import DecodedOperand
from tests.ops.groups import check_product


@pytest.mark.parametrize(("cols", "dtype", "adds"), [(70, torch.bfloat16, False), (72, torch.float32, True)])
def test_product_of_values_and_codes(cols, dtype, adds, simulated):
    x = torch.randn(130, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = DecodedOperand(cols, 96, "e4m3", seed=2, groups=1)
    before, bias = 2.0 if adds else 0.0, torch.linspace(-1.0, 1.0, cols)
    out = torch.full((130, cols), before, dtype=dtype)
    ops.gemm_decoded(Coded(x, "bfloat16"), weight.coded, out=out, bias=bias, accumulate=adds)
    by, values = weight.factor(0), x.double()
    want = by * (values @ weight.values.t()) + bias + before
    check_product(out, want, by * (values.abs() @ weight.values.abs().t()) + bias.abs() + before, "a product")
