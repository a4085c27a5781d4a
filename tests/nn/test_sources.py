"""Quantizers of what is computed in front: the bytes of the values quantized, sums found once."""

from __future__ import annotations

import pytest
import torch

import te_dist as te
from te_dist import ops
from te_dist.formats import Direction
from te_dist.ops.evaluate import values
from te_dist.ops.rms_rstd import rms_norm
from te_dist.ops.source import Summed, sums_shape
from te_dist.quantizers import Quantizer
from te_dist.testing import assert_bitwise
from tests.nn.test_quantizers import E4M3, NAMES, make
from tests.ops.sources import cases, gathered_cases, in_order_cases

SHAPE = (160, 96)
HIGH_PRECISION = te.HybridQuantizer(
    rowwise_quantizer=te.IdentityQuantizer(),
    columnwise_quantizer=te.MXFP8Quantizer(E4M3),
    columnwise_source="rowwise_dequantized",
)


def quantizer_of(name: str) -> Quantizer:
    return HIGH_PRECISION if name == "high precision" else make(name)


@pytest.mark.pairwise
@pytest.mark.parametrize("sources", [in_order_cases, gathered_cases])
@pytest.mark.parametrize("directions", [(), (Direction.ROWWISE,), (Direction.COLUMNWISE,)])
@pytest.mark.parametrize("name", [*NAMES, "high precision"])
def test_a_source_gives_the_bytes_of_its_values(name, directions, sources):
    for case in sources(SHAPE, torch.bfloat16, "normal"):
        got, want = (quantizer_of(name).encode(x, *directions) for x in (case.source, values(case.source)))
        assert got.buffers.keys() == want.buffers.keys()
        for field, buffer in want.buffers.items():
            assert_bitwise(got.buffers[field], buffer, f"{field} of {case.name} by {name}")


@pytest.mark.pairwise
@pytest.mark.parametrize("sources", [in_order_cases, gathered_cases])
@pytest.mark.parametrize("directions", [(), (Direction.ROWWISE,), (Direction.COLUMNWISE,)])
@pytest.mark.parametrize("name", [*NAMES, "high precision"])
def test_columns_are_summed_once_beside_the_same_bytes(name, directions, sources, monkeypatch):
    for case in sources(SHAPE, torch.bfloat16, "normal"):
        plain = values(case.source)
        for x in (plain, case.source):
            sums, passes = torch.full(sums_shape(plain), 77.0), []
            with monkeypatch.context() as patched:
                patched.setattr(te._C, "panel_sums", counted(te._C.panel_sums, passes))
                got = quantizer_of(name).encode(Summed(x, sums), *directions)
            assert len(passes) == 1
            expected = torch.empty_like(sums)
            ops.panel_sums(plain, out=expected)
            assert_bitwise(sums, expected, f"sums of {case.name} by {name}")
            for field, buffer in quantizer_of(name).encode(plain, *directions).buffers.items():
                assert_bitwise(got.buffers[field], buffer, f"{field} of {case.name} by {name}")


def counted(function, calls: list):
    def call(*args):
        calls.append(args)
        return function(*args)

    return call


def test_delayed_scaling_records_the_amax_of_the_values():
    for case in cases(SHAPE, torch.bfloat16, "normal"):
        amax = torch.zeros(1)
        te.Float8Quantizer(torch.tensor([16.0]), amax, E4M3).encode(case.source)
        assert amax.item() == values(case.source).abs().max().item()


@pytest.mark.parametrize("name", NAMES)
def test_a_bias_gradient_comes_with_the_quantized_gradient(name):
    grad = torch.randn(3, 160, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for x in (grad, grad.transpose(0, 1), grad[:0]):
        storage, sums = make(name).encode_and_sum(x)
        torch.testing.assert_close(sums, x.float().sum((0, 1)), rtol=0, atol=1e-4)
        for field, buffer in make(name).encode(x).buffers.items():
            assert_bitwise(storage.buffers[field], buffer, f"{field} by {name}")


def test_a_norm_is_quantized_as_torch_computes_it():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    gamma = torch.linspace(0.5, 2, 256)
    got = make("mxfp8").encode(rms_norm(x, gamma - 1, eps=1e-5, zero_centered=True), Direction.ROWWISE)
    want = torch.nn.functional.rms_norm(x.float(), (256,), gamma, 1e-5).bfloat16()
    assert (got.dequantize() - want).norm() < 0.04 * want.norm()
