"""What is written into quantized tensors and groups, by copies, by quantizers, under autograd; what is refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_dist as te
from te_dist import grouped, optim, quantizers, recipe
from te_dist.catalog import FORMATS
from te_dist.tensor import QuantizedTensor, quantize
from te_dist.testing import assert_bitwise
from tests.tensor.samples import signed

MAKERS = {"matrices": quantize, "groups": grouped.quantize}
of_both = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
SHAPE = (2, 64, 128)


@of_both
@pytest.mark.parametrize("name", ["mxfp8_1d", "float8_block_2d", "nvfp4_1d", "float8_tensorwise_tn"])
def test_tensors_without_a_direction_in_common_are_compared_by_values(name: str, make: Callable) -> None:
    first, second = torch.zeros(SHAPE), torch.ones(SHAPE)
    if name == "float8_tensorwise_tn":  # whose scale is in common
        first, second = (half.repeat(2, 1, 1) for half in torch.eye(128).split(64))
    a, b = make(first, FORMATS[name]), make(second, FORMATS[name])
    a.update_usage(columnwise_usage=False)
    b.update_usage(rowwise_usage=False)
    assert not torch.equal(a, b)


@of_both
@pytest.mark.parametrize("kept", ["both", "rowwise", "columnwise"])
@pytest.mark.parametrize("lacking", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", ["float8_block_2d", "mxfp8_2d", "nvfp4_2d", "float8_tensorwise_tn"])
def test_a_copy_has_the_values_of_its_source_in_each_direction(
    name: str, lacking: str, kept: str, make: Callable
) -> None:
    target, source = (
        make(torch.zeros(SHAPE), FORMATS[name]),
        make(signed(*SHAPE, dtype=torch.float32) * 7, FORMATS[name]),
    )
    wanted = source.dequantize()
    for tensor in (target, source):
        tensor.update_usage(rowwise_usage=True, columnwise_usage=True)
    source.update_usage(**{f"{lacking}_usage": False})
    target.update_usage(**{f"{other}_usage": kept in ("both", other) for other in ("rowwise", "columnwise")})
    target.copy_(source)
    for direction in target.storage.directions:
        assert_bitwise(target.dequantize(direction=direction), wanted, direction.value)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("kind", ["given scale", "current", "hybrid"])
def test_what_a_quantizer_writes_into_a_weight_is_its_masters(kind: str, steps: int) -> None:
    current = quantizers.Float8CurrentScalingQuantizer()
    hybrid = quantizers.HybridQuantizer(rowwise_quantizer=current, columnwise_quantizer=current.copy())
    known = quantizers.Float8Quantizer(torch.tensor([64.0]), None)
    quantizer = {"given scale": known, "current": current, "hybrid": hybrid}[kind]
    made_by = recipe.CustomRecipe(lambda role: hybrid if kind == "hybrid" else current)
    with te.quantized_model_init(recipe=made_by, preserve_high_precision_init_val=True):
        module = te.Linear(128, 128, bias=False, params_dtype=torch.float32)
    optimizer = optim.FusedAdam(module.parameters(), lr=1e-6)
    for step in range(steps + 1):
        if step == steps:
            quantizer.quantize(torch.full((128, 128), 0.25), out=module.weight)
        module.weight.grad = torch.ones(128, 128)
        optimizer.step()
    assert float(module.weight.detach().dequantize().mean()) == pytest.approx(0.25, rel=1e-2)


BLOCKS = quantizers.Float8BlockQuantizer()
WRITES: dict[str, Callable[[QuantizedTensor], Any]] = {
    "_foreach_mul_": lambda weight: torch._foreach_mul_([weight], 2.0),
    "_foreach_copy_": lambda weight: torch._foreach_copy_([weight], [torch.ones_like(weight)]),
    "quantize_": lambda weight: weight.quantize_(torch.ones(weight.shape)),
    "out=": lambda weight: BLOCKS.quantize(torch.ones(weight.shape), out=weight),
}


@of_both
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_backward_raises_where_a_weight_was_written(write: Callable, make: Callable) -> None:
    weight = nn.Parameter(make(signed(*SHAPE), BLOCKS.format()))
    y = (weight * torch.ones(SHAPE, requires_grad=True)).sum()
    saved = torch.ones(SHAPE, requires_grad=True)
    y = y + _Saves.apply(weight, saved).sum()
    with torch.no_grad():
        write(weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (weight,) = ctx.saved_tensors
        return None, grad * weight.dequantize()


@of_both
def test_values_of_another_shape_are_none(make: Callable) -> None:
    target, source = make(torch.zeros(2, 128, 64), FORMATS["float8_block_2d"]), signed(2, 64, 128)
    quantized = make(source, FORMATS["float8_block_2d"])
    for other in (source, quantized, make(source, FORMATS["mxfp8_1d"])):
        with pytest.raises(RuntimeError, match="must match the existing size"):
            target.copy_(other)
    with pytest.raises(ValueError, match=r"a tensor of shape \(2, 128, 64\): got values of shape \(2, 64, 128\)"):
        target.quantize_(source)
    with pytest.raises(ValueError, match="got values of shape"):
        quantizers.Float8BlockQuantizer(block_scaling_dim=2).quantize(source, out=target)
    assert not target.dequantize().any()


def test_a_copy_is_broadcast_as_a_plain_one() -> None:
    target, source = (
        quantize(values, FORMATS["mxfp8_1d"])
        for values in (torch.zeros(3, 64, 128), signed(64, 128, dtype=torch.float32))
    )
    target.copy_(source)
    assert_bitwise(target.dequantize(), source.dequantize().expand(3, 64, 128), "values")


def test_a_quantizer_writes_what_it_makes() -> None:
    target = quantize(torch.zeros(64, 128), FORMATS["mxfp8_1d"])
    for other in (quantizers.Float8Quantizer(torch.ones(1), None), quantizers.Float8CurrentScalingQuantizer(), BLOCKS):
        with pytest.raises(ValueError, match="out: got mxfp8_1d, wanted .*; use the quantizer that made it"):
            other.quantize(torch.ones(64, 128), out=target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_hybrid", [False, True])
def test_a_quantizer_writes_what_it_makes_of_another_nominal_type(is_hybrid: bool, dtype: torch.dtype) -> None:
    quantizer: quantizers.Quantizer = quantizers.IdentityQuantizer()
    if is_hybrid:
        mx = quantizers.MXFP8Quantizer()
        quantizer = quantizers.HybridQuantizer(rowwise_quantizer=mx, columnwise_quantizer=quantizer)
    for target in (quantizer.quantize(signed(64, 128), dtype=dtype), quantizer.quantize(signed(64, 128)).to(dtype)):
        quantizer.quantize(torch.ones(64, 128), out=target)
        assert_bitwise(target.dequantize(), torch.ones(64, 128, dtype=dtype), "values")


def test_scales_that_are_given_are_settled() -> None:
    storage = quantize(signed(64, 128), FORMATS["float8_tensorwise_tn"]).storage
    storage.cut_dims = frozenset({0})  # as of a shard, which shares its scale with others
    part = QuantizedTensor(storage, (64, 128))
    given, own = quantizers.Float8Quantizer(torch.full((1,), 64.0), None), quantizers.Float8CurrentScalingQuantizer()
    for quantizer, is_settled in ((own, False), (given, True)):
        quantizer.quantize(torch.ones(64, 128), out=part)
        assert (storage.unsettled is None) == is_settled


@pytest.mark.parametrize("write", [QuantizedTensor.quantize_, lambda part, x: BLOCKS.quantize(x, out=part)])
def test_parts_are_not_written(write: Callable) -> None:
    whole = quantize(signed(64, 128), BLOCKS.format())
    with pytest.raises(NotImplementedError, match="cannot write into a part"):
        write(whole[:32], torch.ones(32, 128))


@of_both
def test_what_is_no_part_of_a_plain_tensor_is_none_of_a_quantized_one(make: Callable) -> None:
    tensor, plain = make(signed(4, 64, 128), FORMATS["mxfp8_1d"]), torch.empty(4, 64, 128)
    calls: list[Callable[[Tensor], Any]] = [
        lambda x: x.select(0, 5),
        lambda x: x.select(0, -5),
        lambda x: x.select(3, 1),
        lambda x: x.split([1, 1]),
        lambda x: x.split(2, 3),
        lambda x: x.narrow(0, 3, 2),
        lambda x: x.narrow(0, 3, -1),
    ]
    for call in calls:
        for mode in (False, True):
            with torch.inference_mode(mode):
                with pytest.raises((IndexError, RuntimeError)) as wanted:
                    call(plain)
                with pytest.raises(wanted.type) as found:
                    call(tensor)
                assert str(found.value)[:20] == str(wanted.value)[:20]


def test_rows_of_a_view_that_are_no_rows_of_the_matrix_are_refused() -> None:
    view = quantize(signed(256, 128), FORMATS["mxfp8_1d"]).view(512, 64)
    with pytest.raises(NotImplementedError, match=r"rows of a view of \(512, 64\) are none of the quantized matrix"):
        view[2:4]


def test_members_are_views_of_the_group_as_it_is() -> None:
    weight = grouped.quantize(signed(2, 128, 128), FORMATS["float8_block_2d"])
    weight.update_usage(columnwise_usage=False)
    members = weight.members
    for _ in range(2):
        weight.update_usage(columnwise_usage=True)
        for member in members:
            member.fill_(1.0)
        for direction in weight.storage.directions:
            assert_bitwise(weight.dequantize(direction=direction), torch.ones_like(weight), direction.value)
        weight.update_usage(columnwise_usage=False)
    with pytest.raises(NotImplementedError, match="its directions are those of the group"):
        members[0].update_usage(columnwise_usage=True)
    assert members[0].storage.get_usages() == {"rowwise": True, "columnwise": False}
    members[0].update_usage(rowwise_usage=True, columnwise_usage=False)
    tensors, _ = members[0].storage.prepare_for_saving()
    assert len(tensors) == len(weight.storage.buffers) == len(members[0].storage.buffers)


def test_members_and_their_clones_are_saved_and_loaded() -> None:
    weight = grouped.quantize(signed(2, 128, 128), FORMATS["mxfp8_1d"])
    file = io.BytesIO()
    torch.save({"member": weight[1], "clone": weight[1].clone()}, file)
    file.seek(0)
    for name, tensor in torch.load(file).items():
        assert_bitwise(tensor.dequantize(), weight[1].dequantize(), name)


def test_penalties_of_magnitudes_have_gradients() -> None:
    weight = nn.Parameter(quantize(signed(64, 128), FORMATS["mxfp8_1d"]))
    plain = weight.detach().dequantize().requires_grad_()
    for penalty in (
        lambda x: x.abs().sum(),
        lambda x: x.norm(1),
        lambda x: torch.linalg.vector_norm(x, 1, dim=0).sum(),
    ):
        weight.grad = plain.grad = None
        penalty(weight).backward(), penalty(plain).backward()
        assert_bitwise(weight.grad, plain.grad, "gradient")
