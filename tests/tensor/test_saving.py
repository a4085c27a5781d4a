"""Quantized tensors taken apart and put together: for backward, by compilers, by pickle and by copies."""

from __future__ import annotations

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from te_dist.catalog import FORMATS
from te_dist.formats import Direction
from te_dist.tensor import QuantizedTensor, quantize
from te_dist.testing import assert_bitwise
from tests.tensor.samples import NAMES, assert_same_bytes, of_each_family, sample, signed, values

every_format = pytest.mark.parametrize("name", NAMES)


@every_format
def test_saving_takes_what_cannot_be_derived_and_nothing_else(name: str) -> None:
    storage, want = sample(name).storage, sample(name)
    tensors, shell = storage.prepare_for_saving()
    assert storage.buffers == {}
    assert sum(t.nbytes for t in tensors) == FORMATS[name].canonical.allocated_bytes(want.storage.region)
    extra = torch.ones(1)
    assert shell.restore_from_saved([*tensors, extra]) == [extra]
    for direction in shell.format.directions:
        got = shell.operand(direction, torch.float32)
        assert_bitwise(got, want.storage.operand(direction, torch.float32), f"restored {direction.value}")


@every_format
def test_a_part_for_one_direction_saves_that_direction_only(name: str) -> None:
    storage = sample(name).storage
    for direction in storage.format.directions:
        part = storage.select(direction)
        assert list(part.buffers) == [f.name for f in storage.format[direction].fields]
        assert all(buffer is storage.buffers[n] for n, buffer in part.buffers.items())


@every_format
def test_flattening_is_undone(name: str) -> None:
    tensor = sample(name, 2, 48, 160)
    names, context = tensor.__tensor_flatten__()
    inner = {n: getattr(tensor, n) for n in names}
    back = QuantizedTensor.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    assert back.shape == tensor.shape
    assert_same_bytes(back, tensor, "unflatten")


@every_format
def test_pickle_keeps_bytes_and_class(name: str) -> None:
    tensor = sample(name, 2, 48, 160)
    file = io.BytesIO()
    torch.save({"weight": tensor}, file)
    file.seek(0)
    for back in (pickle.loads(pickle.dumps(tensor)), torch.load(file)["weight"]):
        assert type(back) is QuantizedTensor
        assert (back.shape, back.dtype, back.format) == (tensor.shape, tensor.dtype, tensor.format)
        assert_same_bytes(back, tensor, "pickle")


def write_ones(tensor: QuantizedTensor) -> None:
    tensor.fill_(1.0)


@every_format
def test_processes_share_what_was_moved_for_them(name: str) -> None:
    tensor = sample(name, 2, 48, 160)
    assert not tensor.is_shared()
    assert tensor.share_memory_() is tensor
    assert tensor.is_shared()
    assert_same_bytes(tensor, sample(name, 2, 48, 160), "shared")
    write_ones(pickle.loads(ForkingPickler.dumps(tensor)))  # as processes hand it on
    assert (tensor.dequantize() == 1).all()


@pytest.mark.exhaustive  # a process takes seconds to start
def test_a_process_writes_into_what_was_moved_for_it() -> None:
    tensor = sample(NAMES[0], 2, 48, 160).share_memory_()
    its = torch.multiprocessing.get_context("spawn").Process(target=write_ones, args=(tensor,))
    its.start()
    its.join(60)
    assert (tensor.dequantize() == 1).all()


@every_format
def test_deepcopy_shares_nothing(name: str) -> None:
    tensor = sample(name)
    other = copy.deepcopy(tensor)
    assert_same_bytes(other, tensor, "deepcopy")
    other.zero_()
    assert_same_bytes(tensor, sample(name), "the original")


class Take(torch.autograd.Function):
    """Saves a quantized tensor and multiplies by its values in backward."""

    @staticmethod
    def forward(ctx, x, saved):
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        assert isinstance(saved, QuantizedTensor)
        return grad * saved.dequantize(), None


@every_format
def test_hooks_on_saved_tensors_see_one_tensor(name: str) -> None:
    tensor, seen = sample(name), []

    def pack(saved):
        seen.append(saved)
        return saved

    x = torch.ones(tensor.shape, dtype=tensor.dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        y = Take.apply(x, tensor)
    y.sum().backward()
    (saved,) = seen
    assert isinstance(saved, QuantizedTensor)
    assert_bitwise(x.grad, tensor.dequantize(), "gradient")


def test_a_pickled_format_carries_no_hash_of_this_process() -> None:
    format = FORMATS["hybrid_mxfp8_nvfp4"]
    hash(format), format.directions
    state = pickle.loads(pickle.dumps(format)).__dict__
    assert set(state) == {"rowwise", "columnwise"}


def scaled(tensor: QuantizedTensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A view of the argument and a product of its values."""
    return tensor.view(2, -1, tensor.shape[-1]), tensor * factor


@of_each_family
@every_format
def test_a_function_of_quantized_tensors_compiles_in_one_graph(name: str) -> None:
    torch.compiler.reset()
    tensor, factor = sample(name), torch.tensor(2.0)
    compiled = torch.compile(scaled, backend="aot_eager", fullgraph=True)
    got, want = compiled(tensor, factor), scaled(tensor, factor)
    assert got[0].shape == want[0].shape
    assert_same_bytes(got[0], want[0], "a compiled view")
    assert_bitwise(got[1], want[1], "compiled values")


def test_a_direction_that_is_missing_is_named() -> None:
    rowwise = quantize(signed(), FORMATS["mxfp8_1d"].select(Direction.ROWWISE))
    with pytest.raises((RuntimeError, KeyError), match="columnwise"):
        rowwise.storage.operand(Direction.COLUMNWISE, torch.float32)


def test_quantizing_integers_says_what_to_convert_to() -> None:
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        quantize(values().to(torch.int32), FORMATS["mxfp8_1d"])
