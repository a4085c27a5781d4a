"""Every op a QuantizedTensor supports, on every format; every other op refuses by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dist.catalog import FORMATS
from te_dist.tensor import OPS, QuantizedTensor, quantize
from te_dist.tensor.aten_values import COMPARING, FRESH, READING, WRITING, WRITING_KEPT, WRITING_LISTS
from te_dist.testing import assert_bitwise
from tests.tensor.calls import arguments, plain
from tests.tensor.samples import NAMES, SHAPE, assert_same_bytes, of_each_family, sample, values

aten = torch.ops.aten
NEEDS_CUDA = {"record_stream.default", "_pin_memory.default", "is_pinned.default"}


def overload(name: str) -> Any:
    """The aten overload of that name; None where this torch has none."""
    packet, _, variant = name.partition(".")
    return getattr(getattr(aten, packet, None), variant, None)


def present(names: list[str]) -> list[tuple[str, Any]]:
    """(name, overload) of those that this torch has."""
    return [(name, op) for name in names if (op := overload(name)) is not None]


@of_each_family
@pytest.mark.parametrize("name", NAMES)
def test_reading_ops_give_what_they_give_on_the_values(name: str) -> None:
    tensor = sample(name)
    for op_name, op in present([*READING, *COMPARING]):
        args = arguments(op, tensor)
        got, want = op(*args), op(*plain(args))
        for a, b in zip(leaves(got), leaves(want), strict=True):
            assert not isinstance(a, QuantizedTensor), f"{op_name} returns a quantized tensor"
            if isinstance(b, torch.Tensor):
                assert_bitwise(a, b, op_name)
            else:
                assert a == b, op_name
    assert_same_bytes(tensor, sample(name), "reading")


@of_each_family
@pytest.mark.parametrize("name", NAMES)
def test_writing_ops_quantize_what_they_give_on_the_values(name: str) -> None:
    for op_name, op in present(WRITING):
        target = sample(name)
        args, want = arguments(op, target), target.dequantize()
        torch.manual_seed(1)
        result = op(*args)
        torch.manual_seed(1)
        op(*arguments(op, want))
        assert result.storage is target.storage, f"{op_name} does not write in place"
        assert_same_bytes(target, quantize(want, FORMATS[name]), op_name)


@of_each_family
@pytest.mark.parametrize("name", NAMES)
def test_list_ops_quantize_every_member(name: str) -> None:
    for op_name, op in present(WRITING_LISTS):
        target = sample(name)
        args, want = arguments(op, target), target.dequantize()
        op(*args)
        op(*arguments(op, want))
        assert_same_bytes(target, quantize(want, FORMATS[name]), op_name)


@of_each_family
@pytest.mark.parametrize("name", NAMES)
def test_fresh_ops_give_plain_tensors(name: str) -> None:
    tensor = sample(name)
    for op_name, op in present(FRESH):
        got = op(*arguments(op, tensor))
        assert type(got) is torch.Tensor, op_name
        assert got.dtype == tensor.dtype, op_name
        assert got.shape in (tensor.shape, (3,)), op_name


@of_each_family
@pytest.mark.parametrize("name", NAMES)
def test_every_listed_op_can_be_called(name: str) -> None:
    listed = [op.removeprefix("aten.") for op in OPS.names()]
    shape, stacked = (1, *SHAPE), ("squeeze.dim", "unbind.int")
    for op_name, op in present([n for n in listed if n not in (*NEEDS_CUDA, *WRITING_KEPT)]):
        tensor = sample(name, *shape) if op_name in stacked else sample(name)
        tensor = tensor.split(48)[0] if op_name == "constant_pad_nd.default" else tensor
        op(*arguments(op, tensor))


@pytest.mark.parametrize(
    ("call", "op"),
    [
        (lambda q: torch.mm(q, torch.ones(SHAPE[1], 2, dtype=q.dtype)), "aten.mm.default"),
        (lambda q: torch.nn.functional.linear(torch.ones(2, SHAPE[1], dtype=q.dtype), q), "aten.t.default"),
        (torch.fft.fft, "aten._fft_r2c.default"),
        (torch.linalg.svd, "aten._linalg_svd.default"),
    ],
    ids=["mm", "linear", "fft", "svd"],
)
def test_an_unknown_op_raises_with_its_name(call: Any, op: str) -> None:
    with pytest.raises(NotImplementedError, match=op.replace(".", r"\.")) as error:
        call(sample("float8_block_2d", dtype=torch.float32))
    assert "dequantize()" in str(error.value)


def test_an_op_can_have_one_handler_only() -> None:
    with pytest.raises(ValueError, match="implemented twice"):
        OPS.implements(aten.detach.default)(lambda func, args, kwargs: None)


def test_reading_ops_do_not_make_views() -> None:
    # A view of the values would be a copy that swallows writes: views of quantized tensors share the storage.
    tensor = sample("float8_block_2d")
    assert tensor.view(-1).storage is tensor.storage
    assert tensor[None].storage is tensor.storage
    before = values()
    assert_bitwise(tensor.dequantize(), quantize(before, tensor.format).dequantize(), "untouched")


def leaves(tree: Any) -> list[Any]:
    """Tensors and numbers in a result."""
    return list(tree) if isinstance(tree, (tuple, list)) else [tree]
