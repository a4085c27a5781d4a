"""Ops that move bytes: views share, copies own, parts hold the bytes of the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from te_dist.catalog import FORMATS
from te_dist.formats import Direction, geometry
from te_dist.tensor import QuantizedStorage, QuantizedTensor, quantize
from te_dist.testing import assert_bitwise
from tests.tensor.samples import NAMES, SHAPE, assert_same_bytes, sample, signed, values

every_format = pytest.mark.parametrize("name", NAMES)


def pointers(tensor: QuantizedTensor) -> set[int]:
    """Addresses of all buffers."""
    return {buffer.data_ptr() for buffer in tensor.storage.buffers.values()}


@every_format
def test_views_share_one_storage(name: str) -> None:
    tensor = sample(name, 4, 48, 160)
    for view in (
        tensor.detach(),
        tensor.view(-1, 160),
        tensor.view(2, 2, 48, 160),
        tensor.reshape(-1, 160),
        tensor[None],
        tensor[None].squeeze(0),
        tensor[:],
        tensor.as_strided(tensor.shape, tensor.stride()),
        tensor.contiguous(),
    ):
        assert view.storage is tensor.storage
    assert tensor.view(-1, 160).shape == (192, 160)
    assert_bitwise(tensor.view(-1, 160).dequantize(), tensor.dequantize().view(-1, 160), "values of a view")


@every_format
def test_a_clone_shares_nothing(name: str) -> None:
    tensor = sample(name)
    clone = tensor.clone()
    assert not pointers(clone) & pointers(tensor)
    assert_same_bytes(clone, tensor, "clone")
    clone.zero_()
    assert_same_bytes(tensor, sample(name), "the original")


@every_format
def test_parts_hold_the_values_of_the_whole(name: str) -> None:
    tensor, want = sample(name), sample(name).dequantize()
    for parts in (tensor.split(32), tensor.split([16, 80]), tensor.chunk(2), tensor.tensor_split(3)):
        assert all(isinstance(part, QuantizedTensor) for part in parts)
        assert_bitwise(torch.cat([part.dequantize() for part in parts]), want, "row parts")
        assert not any(pointers(part) & pointers(tensor) for part in parts if part.shape[0] < SHAPE[0])
    assert_bitwise(tensor[16:48].dequantize(), want[16:48], "rows")
    assert_bitwise(tensor[:, 32:64].dequantize(), want[:, 32:64], "columns")
    assert_bitwise(tensor.narrow(1, 0, 32).dequantize(), want.narrow(1, 0, 32), "narrow")
    assert tensor[96:].shape == (0, 160)


@every_format
def test_members_of_a_stack_are_parts(name: str) -> None:
    tensor = sample(name, 4, 48, 160)
    want = tensor.dequantize()
    assert_bitwise(tensor[2].dequantize(), want[2], "member")
    assert_bitwise(tensor[1:3].dequantize(), want[1:3], "members")
    for got, member in zip(tensor, want, strict=True):
        assert_bitwise(got.dequantize(), member, "one of all members")


@every_format
def test_cuts_that_no_format_can_make_raise(name: str) -> None:
    tensor = sample(name)
    for cut in (
        lambda: tensor[::2],
        lambda: tensor[0],
        lambda: list(tensor),
        lambda: tensor.expand(2, -1, -1),
        lambda: tensor.as_strided((8, 8), (160, 1)),
    ):
        with pytest.raises(NotImplementedError, match="dequantize"):
            cut()


@every_format
def test_copy_takes_bytes_of_the_same_format(name: str) -> None:
    target = sample(name)
    source = quantize(signed(), FORMATS[name])
    storage = target.storage
    assert target.copy_(source) is target
    assert target.storage is storage
    assert_same_bytes(target, source, "copy_")


@every_format
def test_copy_quantizes_values_and_gives_them(name: str) -> None:
    target, x = sample(name), signed()
    target.copy_(x)
    assert_same_bytes(target, quantize(x, FORMATS[name]), "copy_ of values")
    plain = torch.empty(SHAPE, dtype=torch.bfloat16)
    plain.copy_(target)
    assert_bitwise(plain, target.dequantize(), "copy_ to a plain tensor")


@every_format
def test_copy_between_formats_goes_through_values(name: str) -> None:
    other = "mxfp8_1d" if name != "mxfp8_1d" else "float8_block_1d"
    source, target = quantize(signed(), FORMATS[other]), sample(name)
    target.copy_(source)
    assert_same_bytes(target, quantize(source.dequantize(), FORMATS[name]), "copy_ across formats")


@every_format
def test_empty_like_declares_the_same_buffers(name: str) -> None:
    tensor = sample(name)
    other = torch.empty_like(tensor)
    assert not pointers(other) & pointers(tensor)
    shapes = [{n: (b.shape, b.dtype) for n, b in t.storage.buffers.items()} for t in (other, tensor)]
    assert shapes[0] == shapes[1]
    on_meta = torch.empty_like(tensor, device="meta")
    assert all(buffer.is_meta for buffer in on_meta.storage.buffers.values())


@every_format
def test_a_conversion_changes_the_nominal_dtype_only(name: str) -> None:
    tensor = sample(name)
    converted = tensor.to(torch.float16)
    assert converted.dtype == converted.dequantize().dtype == torch.float16
    assert_same_bytes(converted, tensor, "conversion")
    assert not pointers(converted) & pointers(tensor)
    for dtype in (torch.int32, torch.float64, torch.float8_e4m3fn):
        with pytest.raises(NotImplementedError, match="values of float32, bfloat16 or float16, got dtype"):
            tensor.to(dtype)


@every_format
def test_equal_compares_bytes(name: str) -> None:
    tensor = sample(name)
    assert torch.equal(tensor, sample(name))
    assert not torch.equal(tensor, quantize(signed(), FORMATS[name]))
    assert torch.equal(tensor, tensor.dequantize())


@every_format
def test_usages_come_and_go(name: str) -> None:
    tensor = sample(name)
    both = {n: b.clone() for n, b in tensor.storage.buffers.items()}
    if Direction.COLUMNWISE not in tensor.format:
        with pytest.raises((KeyError, RuntimeError)):
            tensor.update_usage(columnwise_usage=True)
        return
    tensor.update_usage(columnwise_usage=False)
    rowwise = {f.name for f in tensor.format.rowwise.fields}
    assert set(tensor.storage.buffers) == rowwise
    if not tensor.format.columnwise_is_derivable and rowwise != set(both):
        with pytest.raises(RuntimeError, match="independently"):
            tensor.update_usage(columnwise_usage=True)
        return
    tensor.update_usage(columnwise_usage=True)
    for buffer_name, buffer in both.items():
        assert_bitwise(tensor.storage.buffers[buffer_name], buffer, f"derived {buffer_name}")
    with pytest.raises(RuntimeError, match="no direction"):
        tensor.update_usage(rowwise_usage=False, columnwise_usage=False)


@every_format
def test_assigned_data_is_taken_over(name: str) -> None:
    tensor = sample(name)
    tensor.data = signed()
    assert_same_bytes(tensor, quantize(signed(), FORMATS[name]), "data of values")
    other = quantize(values(48, 160), FORMATS[name])
    tensor.data = other
    assert tensor.storage is other.storage
    assert tensor.shape == (48, 160)
    with pytest.raises(ValueError, match="shape"):
        tensor.data = torch.zeros(3, 3)


def test_a_copy_that_would_leave_a_direction_behind_is_refused() -> None:
    target, source = sample("mxfp8_1d"), sample("mxfp8_1d")
    source.update_usage(columnwise_usage=False)
    with pytest.raises(RuntimeError, match="no columnwise direction"):
        target.copy_(source)


@pytest.mark.parametrize("shape", [(48, 160), (33, 65), (128, 256), (0, 64), (7, 130)])
@every_format
def test_derived_directions_are_relayouts(name: str, shape: tuple[int, int]) -> None:
    format = FORMATS[name]
    if not format.columnwise_is_derivable or any(n % format.alignment(d) for d, n in enumerate(shape)):
        pytest.skip("its columns are values of their own, or it cannot hold this shape")
    if any(f.pack > 1 for f in format.columnwise.fields) and shape[0] % 2:
        pytest.skip("two rows share a byte")
    storage = quantize(torch.randn(shape), format).storage
    rowwise = QuantizedStorage(
        format, {f.name: storage.buffers[f.name] for f in format.rowwise.fields}, storage.region, dtype=storage.dtype
    )
    both = rowwise.with_derived(Direction.COLUMNWISE)
    assert rowwise.directions == (Direction.ROWWISE,) or len(format.fields) == len(format.rowwise.fields)
    for src, dst in zip(format.rowwise.fields, format.columnwise.fields, strict=True):
        want = geometry.relayout(src, dst, storage.buffers[src.name], storage.region)
        assert_bitwise(both.buffers[dst.name], want, dst.name)


WRITES = {
    "assignment": lambda q: q.__setitem__(slice(0, 64), 2.0),
    "columns": lambda q: q[:, :32].fill_(2.0),
    "part of a part": lambda q: q[:64][:32].zero_(),
    "values": lambda q: q.narrow(0, 0, 32).copy_(torch.ones(32, SHAPE[1])),
    "bytes": lambda q: q[:32].copy_(q[32:64]),
    "chunk": lambda q: q.chunk(2)[0].mul_(2.0),
    "view": lambda q: q[:64].view(2, 32, -1).detach().zero_(),
    "member": lambda q: q.view(2, -1, SHAPE[1])[1].zero_(),
    "every member": lambda q: [member.zero_() for member in q.view(2, -1, SHAPE[1])],
    "list": lambda q: torch._foreach_zero_([q[:32]]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("name", ["float8_tensorwise", "float8_block_2d", "nvfp4_2d", "high_precision"])
def test_a_write_into_a_part_raises_where_the_whole_would_not_change(name: str, write: Callable) -> None:
    tensor = sample(name)
    with pytest.raises(NotImplementedError, match=r"whole\.copy_\(values\).*clone the part"):
        write(tensor)
    assert_same_bytes(tensor, sample(name), "the whole")


@every_format
def test_parts_of_everything_and_copies_of_parts_are_written(name: str) -> None:
    tensor, part = sample(name), sample(name)[:32].clone()
    tensor.expand(1, *SHAPE)[:] = 0.0
    assert not tensor.dequantize().any()
    part.zero_()
    assert not part.dequantize().any()
    tensor[:0] = 1.0  # nothing
    values = tensor.dequantize()
    values[:64] = 2.0
    tensor.copy_(values)
    assert_same_bytes(tensor, quantize(values, FORMATS[name]), "as the error says")
