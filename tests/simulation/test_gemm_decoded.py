"""Products of values with codes that are decoded wherever they lie, simulated, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.kernels import gemm_staged
from te_dist.kernels.gemm_staged import HEIGHTS
from te_dist.kernels.runtime import recording
from te_dist.ops.gemm_decoded import Coded
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


MX, MX_TURNED, NV, GRADS = ("e4m3", False), ("e4m3", True), ("e2m1", False), ("e5m2", True)


@pytest.mark.parametrize("height", HEIGHTS)
@pytest.mark.parametrize("sides", [(MX, MX), (MX, MX_TURNED), (GRADS, MX_TURNED), (NV, NV), (MX, NV), (NV, MX_TURNED)])
def test_product_of_codes_with_scale_bytes(sides, height, monkeypatch, simulated):
    """Of rows and columns that are no multiples of a tile, and of more steps than rings have stages."""
    monkeypatch.setattr(gemm_staged, "ENOUGH_TILES", 0 if height == max(HEIGHTS) else 2**20)
    x, y = (
        DecodedOperand(extent, 832, kind, seed=extent, groups=1, turned=turned)
        for extent, (kind, turned) in zip((272, 144), sides, strict=True)
    )
    a, b = (its.coded if turned else with_room(its.coded) for its, (_, turned) in zip((x, y), sides, strict=True))
    is_nan = torch.zeros(272, dtype=torch.bool)
    if sides[0][0] == "e4m3":  # which takes a longer way
        a.codes[201, 77], is_nan[201] = 0x7F, True
    out = torch.full((272, 144), torch.nan)
    ops.gemm_decoded(a, b, out=out)
    by = x.factor(0) * y.factor(0)
    want, sums = by * (x.values @ y.values.t()), by * (x.values.abs() @ y.values.abs().t())
    check_product(out[~is_nan], want[~is_nan], sums[~is_nan], "a product")
    assert out[is_nan].isnan().all()


def test_room_for_whole_words_of_scales_changes_the_kernel(simulated):
    """Where lines of codes end with a stage and lines of scales inside of a word."""
    x, y = (DecodedOperand(rows, 192, "e4m3", seed=rows, groups=1) for rows in (130, 72))
    a, b, by = x.coded, y.coded, x.factor(0) * y.factor(0)
    kernels = []
    for left, right in ((a, b), (with_room(a), with_room(b))):
        out = torch.full((130, 72), torch.nan)
        ops.gemm_decoded(left, right, out=out)
        with recording() as specs:
            sides = (side._replace(codes=side.codes.to("meta"), scale=on_meta(side.scale)) for side in (left, right))
            ops.gemm_decoded(*(side._replace(factor=side.factor.to("meta")) for side in sides), out=out.to("meta"))
        kernels += [spec.template.split("<")[0] for spec in specs]
        sums = by * (x.values.abs() @ y.values.abs().t())
        check_product(out, by * (x.values @ y.values.t()), sums, f"a product by {kernels[-1]}")
    assert kernels == ["GemmDecoded", "GemmStaged"]
