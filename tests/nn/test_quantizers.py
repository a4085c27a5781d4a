"""Quantizers: descriptions under TransformerEngine's names."""

from __future__ import annotations

import pytest
import torch

import te_dist as te
from te_dist import recipe
from te_dist.catalog import FORMATS
from te_dist.formats import Direction
from te_dist.kernels import runtime
from te_dist.quantizers import Quantizer
from te_dist.tensor import QuantizedTensor, quantize
from te_dist.testing import assert_bitwise

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def make(name: str) -> Quantizer:
    """A new quantizer of that name."""
    return {
        "float8": lambda: te.Float8Quantizer(torch.tensor([16.0]), torch.zeros(1), E4M3),
        "current": lambda: te.Float8CurrentScalingQuantizer(E4M3),
        "current_e5m2": lambda: te.Float8CurrentScalingQuantizer(E5M2, force_pow_2_scales=True, amax_epsilon=1e-3),
        "block_1d": lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=1),
        "block_2d": lambda: te.Float8BlockQuantizer(E4M3, amax_epsilon=0.5),
        "mxfp8": lambda: te.MXFP8Quantizer(E4M3),
        "nvfp4": lambda: te.NVFP4Quantizer(with_rht=True),
        "nvfp4_2d": lambda: te.NVFP4Quantizer(with_2d_quantization=True),
        "identity": te.IdentityQuantizer,
        "hybrid": lambda: te.HybridQuantizer(
            rowwise_quantizer=te.MXFP8Quantizer(E4M3), columnwise_quantizer=te.NVFP4Quantizer()
        ),
    }[name]()


NAMES = (
    "float8", "current", "current_e5m2", "block_1d", "block_2d", "mxfp8", "nvfp4", "nvfp4_2d", "identity", "hybrid"
)  # fmt: skip
every_quantizer = pytest.mark.parametrize("name", NAMES)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


@every_quantizer
def test_it_quantizes_into_the_format_it_declares(name: str) -> None:
    quantizer, x = make(name), normal(2, 16, 64)
    tensor = quantizer(x)
    assert isinstance(tensor, QuantizedTensor)
    assert tensor.format == quantizer.format()
    assert (tensor.shape, tensor.dtype) == (x.shape, x.dtype)
    if name not in ("float8", "current_e5m2"):
        assert (tensor.dequantize() - x).norm() < 0.15 * x.norm()
    assert quantizer.quantize(x, dtype=torch.float32).dtype == torch.float32


@every_quantizer
def test_out_is_written_in_place(name: str) -> None:
    quantizer, x = make(name), normal(32, 64)
    want = quantizer(x)
    out = quantizer.make_empty((32, 64), dtype=torch.bfloat16)
    assert quantizer.quantize(x, out=out) is out
    for field, buffer in want.storage.buffers.items():
        assert_bitwise(out.storage.buffers[field], buffer, field)


@every_quantizer
def test_usages_change_what_is_written_next_and_nothing_before(name: str) -> None:
    quantizer, x = make(name), normal(32, 64)
    both = quantizer(x)
    quantizer.set_usage(columnwise=False)
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": False}
    rowwise = quantizer(x)
    assert both.format.directions == (Direction.ROWWISE, Direction.COLUMNWISE)
    assert rowwise.format.directions == (Direction.ROWWISE,)
    for field, buffer in rowwise.storage.buffers.items():
        assert_bitwise(buffer, both.storage.buffers[field], field)
    with pytest.raises(ValueError, match="'colwise'"):
        quantizer.set_usage(colwise=True)


@every_quantizer
def test_a_copy_is_of_its_own(name: str) -> None:
    quantizer = make(name)
    other = quantizer.copy()
    other.set_usage(rowwise=False)
    assert quantizer.get_usages()["rowwise"]
    assert type(other) is type(quantizer)


@every_quantizer
def test_gradients_pass_through(name: str) -> None:
    x = normal(32, 64).requires_grad_()
    module = te.Linear(64, 32, bias=False, params_dtype=torch.bfloat16)
    module.weight.requires_grad_(False)
    module(make(name)(x)).sum().backward()
    assert_bitwise(x.grad, module.weight.sum(0, dtype=torch.float32).bfloat16().expand(32, 64), "gradient")


def test_what_fits_is_asked_beforehand() -> None:
    assert te.NVFP4Quantizer(with_rht=True).is_quantizable(normal(32, 64))
    assert not te.NVFP4Quantizer(with_rht=True).is_quantizable(normal(24, 64))
    assert te.NVFP4Quantizer(with_rht=True, columnwise=False).is_quantizable(normal(24, 64))
    assert not te.NVFP4Quantizer(columnwise=False).is_quantizable(normal(32, 63))
    assert te.MXFP8Quantizer().is_quantizable(normal(5, 7))


def test_a_known_scale_is_used_and_the_amax_recorded() -> None:
    amax = torch.tensor([3.0])
    quantizer = te.Float8Quantizer(torch.tensor([2.0]), amax, E4M3)
    tensor = quantizer(torch.tensor([[1.0, -5.0, 300.0, 0.5]]))
    assert_bitwise(tensor.scale_inv, torch.tensor([[0.5]]), "scale_inv")
    assert_bitwise(tensor.dequantize(), torch.tensor([[1.0, -5.0, 224.0, 0.5]]), "values, clamped at 448 / 2")
    assert_bitwise(amax, torch.tensor([300.0]), "amax")
    te.Float8Quantizer(torch.tensor([2.0]), None, E4M3)(torch.tensor([[1000.0]]))


def one_object_twice() -> te.HybridQuantizer:
    """A hybrid of one quantizer with itself."""
    quantizer = te.MXFP8Quantizer()
    return te.HybridQuantizer(rowwise_quantizer=quantizer, columnwise_quantizer=quantizer)


def hybrid_of(source: str) -> te.HybridQuantizer:
    """A hybrid whose columns come from `source`."""
    return te.HybridQuantizer(
        rowwise_quantizer=te.MXFP8Quantizer(), columnwise_quantizer=te.NVFP4Quantizer(), columnwise_source=source
    )


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda: te.NVFP4Quantizer(with_2d_quantization=True, with_rht=True), "turn one"),
        (lambda: te.NVFP4Quantizer(row_scaled_nvfp4=True, with_2d_quantization=True), "per row"),
        (lambda: te.NVFP4Quantizer(nvfp4_use_4over6=True, stochastic_rounding=True), "four_over_six"),
        (lambda: te.MXFP8Quantizer(torch.float16), "float8_e4m3fn"),
        (lambda: te.Float8CurrentScalingQuantizer("e3m4"), "float8_e4m3fn"),
        (lambda: te.Float8BlockQuantizer(block_scaling_dim=3), "or squares"),
        (lambda: te.Float8Quantizer(16.0, None), "scale is an fp32 tensor"),
        (lambda: te.Float8Quantizer(torch.ones(1), torch.zeros(1).double()), "amax is an fp32 tensor"),
        (lambda: te.Float8Quantizer(torch.ones(2), None)(torch.ones(2, 2)), "one element, got 2"),
        (lambda: te.MXFP8Quantizer()(torch.tensor(1.0)), "without dimensions"),
        (one_object_twice, "one object"),
        (lambda: hybrid_of("rows"), "columnwise_source"),
    ],
)
def test_what_cannot_be_is_refused(wrong, match) -> None:
    with pytest.raises(ValueError, match=match):
        wrong()


def test_a_hybrid_tensor_is_a_quantized_tensor() -> None:
    assert isinstance(make("hybrid")(normal(32, 64)), te.HybridQuantizedTensor)


def test_hybrids_of_one_format_share_its_bytes() -> None:
    x = normal(32, 64)
    hybrid = te.HybridQuantizer(rowwise_quantizer=te.MXFP8Quantizer(), columnwise_quantizer=te.MXFP8Quantizer())
    want = quantize(x, FORMATS["mxfp8_1d"])
    got = hybrid(x)
    for direction in Direction:
        assert_bitwise(got.dequantize(direction=direction), want.dequantize(direction=direction), direction.value)


def test_row_scaled_inputs_have_an_amax_per_row() -> None:
    tensor = te.NVFP4Quantizer(row_scaled_nvfp4=True)(normal(32, 64))
    assert tensor.row_amax.shape == (32, 1)
    assert tensor.col_amax.shape == (1, 1)
    assert recipe.NVFP4BlockScaling(row_scaled_activation=True)


def test_what_products_read_in_either_order_is_written_once() -> None:
    x, quantizer = torch.randn(32, 64), te.Float8CurrentScalingQuantizer()
    for directions in (tuple(Direction), (Direction.ROWWISE,), (Direction.COLUMNWISE,)):
        assert list(quantizer.encode(x, *directions).buffers) == ["qdata", "scale_inv"]
    assert list(quantizer(x).storage.buffers) == ["qdata", "scale_inv", "qdata_t"]


@pytest.mark.parametrize("with_rht", [False, True])
def test_nvfp4_reads_its_input_twice(with_rht: bool) -> None:
    """For both amaxes, which two kernels set to zero before, and for both directions of codes."""
    x = torch.empty(256, 512, dtype=torch.bfloat16, device="meta")
    with runtime.recording() as specs:
        te.NVFP4Quantizer(with_rht=with_rht, stochastic_rounding=True).encode(x)
    assert [spec.template.partition("<")[0] for spec in specs] == ["Zero", "Zero", "DirectionAmax", "QuantizeNvFp4"]
