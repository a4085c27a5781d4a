"""Products of values with codes that are decoded wherever they lie, simulated, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.kernels.runtime import recording
from te_dist.ops.gemm_decoded import Coded
from te_dist.testing import assert_bitwise
from tests.ops.grouped_decoded import DecodedOperand, with_room
from tests.ops.groups import check_product


def on_meta(view: Tensor) -> Tensor:
    """A view of the same strides, in as much memory."""
    memory = torch.empty(view.untyped_storage().nbytes(), dtype=view.dtype, device="meta")
    return memory.as_strided(view.shape, view.stride())


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


def test_room_for_whole_words_of_scales_changes_the_kernel_and_no_bit(simulated):
    """Where lines of codes end with a stage and lines of scales inside of a word."""
    a, b = (DecodedOperand(rows, 192, "e4m3", seed=rows, groups=1).coded for rows in (130, 72))
    outs = [torch.full((130, 72), torch.nan) for _ in range(2)]
    kernels = []
    for out, (left, right) in zip(outs, ((a, b), (with_room(a), with_room(b))), strict=True):
        ops.gemm_decoded(left, right, out=out)
        with recording() as specs:
            sides = (side._replace(codes=side.codes.to("meta"), scale=on_meta(side.scale)) for side in (left, right))
            ops.gemm_decoded(*(side._replace(factor=side.factor.to("meta")) for side in sides), out=out.to("meta"))
        kernels += [spec.template.split("<")[0] for spec in specs]
    assert kernels == ["GemmDecoded", "GemmStaged"]
    assert_bitwise(outs[1], outs[0], "a product")
