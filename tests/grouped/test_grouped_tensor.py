"""Groups of quantized matrices: each member is the matrix quantized alone, and all lie in one buffer per field."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from te_dist import grouped
from te_dist.formats import Direction, Group, geometry
from te_dist.fsdp2 import GroupedParameter
from te_dist.grouped import GroupedTensor
from te_dist.grouped import storage as storage_module
from te_dist.offload.saved import take_apart
from te_dist.tensor import OPS as OF_MATRICES
from te_dist.tensor import QuantizedTensor, quantize
from te_dist.tensor.aten_values import AVERAGING, COMPARING, READING, WRITING, WRITING_LISTS
from te_dist.testing import assert_bitwise
from tests.grouped.samples import FORMATS, NAMES, RAGGED, SHAPE, UNALIKE, assert_members, sample, values
from tests.tensor.calls import arguments, plain
from tests.tensor.samples import of_each_family
from tests.tensor.test_op_table import leaves, present

aten = torch.ops.aten
every_format = pytest.mark.parametrize("name", NAMES)


def ragged(name: str, shapes: tuple[tuple[int, int], ...] = RAGGED) -> tuple[GroupedTensor, list[torch.Tensor]]:
    matrices = [values(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    return grouped.quantize(matrices, FORMATS[name]), matrices


@every_format
def test_members_are_views_of_one_buffer_per_field(name: str) -> None:
    x = values(*SHAPE)
    group = grouped.quantize(x, FORMATS[name])
    assert group.shape == SHAPE
    assert_members(group, x, "of one tensor")
    assert_members(grouped.quantize(list(x), FORMATS[name]), x, "of a list")
    for field in group.format.fields:
        whole = getattr(group, field.name)
        assert whole.is_contiguous()
        assert whole.shape == (SHAPE[0], *field.shape(group.storage.region))
        for member in group.members:
            assert member.storage.buffers[field.name].untyped_storage() is not None
            assert member.storage.buffers[field.name].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@every_format
@pytest.mark.parametrize("rows", [128, 64, 32, 40])
def test_members_of_whole_tiles_are_quantized_as_if_alone(name: str, rows: int) -> None:
    if rows % FORMATS[name].alignment(0):
        return
    x = values(4, rows, 160)
    group = grouped.empty([(rows, 160)] * 4, FORMATS[name])
    for buffer in group.storage.buffers.values():
        buffer.view(torch.uint8).fill_(0xFF)
        assert buffer.is_contiguous()
    for field in FORMATS[name].fields:  # padding is zero
        for member in group.members:
            stored = member.storage.buffers[field.name]
            stored.copy_(
                geometry.padded(field, geometry.compact(field, stored, member.storage.region), group.storage.region)
            )
    group.quantize_(x)
    assert_members(group, x, f"{rows} rows")
    alone = [quantize(matrix, FORMATS[name]) for matrix in x]
    assert_bitwise(group.dequantize(), torch.stack([each.dequantize() for each in alone]), "values")
    for direction in FORMATS[name].directions:
        operands = [each.storage.operand(direction, torch.float32) for each in alone]
        assert_bitwise(group.storage.operand(direction, torch.float32), torch.stack(operands), direction.value)


@every_format
@pytest.mark.parametrize("shapes", [RAGGED, UNALIKE], ids=["rows", "rows and columns"])
def test_members_of_different_shapes(name: str, shapes: tuple[tuple[int, int], ...]) -> None:
    group, matrices = ragged(name, shapes)
    sizes = [m.numel() for m in matrices]
    assert group.shape == ((sum(sizes) // 160, 160) if shapes is RAGGED else (sum(sizes),))
    assert_members(group, matrices, "ragged")
    for got, want in zip(group.dequantize_members(), matrices, strict=True):
        assert_bitwise(got, quantize(want, group.format).dequantize(), "values")
    again = [2 * m for m in matrices]
    group.quantize_(again)
    assert_members(group, again, "quantized in place")


@every_format
def test_what_is_written_into_a_member_is_written_into_the_group(name: str) -> None:
    group, x = grouped.empty([SHAPE[1:]] * 3, FORMATS[name]), values(*SHAPE, seed=1)
    assert group.group == Group.whole(*SHAPE)
    for member, matrix in zip(group.members, x, strict=True):
        member.quantize_(matrix)
    assert grouped.quantize(x, FORMATS[name]).equal(group)
    assert not grouped.quantize(2 * x.flip(0), FORMATS[name]).equal(group)


@every_format
def test_values_are_those_of_the_members(name: str) -> None:
    group, x = sample(name), values(*SHAPE)
    want = [quantize(matrix, FORMATS[name]) for matrix in x]
    assert_bitwise(group.dequantize(), torch.stack([w.dequantize() for w in want]), "values")
    for direction in FORMATS[name].directions:
        operands = [w.storage.operand(direction, torch.float32) for w in want]
        assert_bitwise(group.storage.operand(direction, torch.float32), torch.stack(operands), direction.value)


@every_format
@pytest.mark.parametrize("shapes", [None, RAGGED], ids=["uniform", "ragged"])
def test_directions_come_and_go(name: str, shapes: Any) -> None:
    group, matrices = ragged(name) if shapes else (sample(name), list(values(*SHAPE)))
    if FORMATS[name].columnwise is None:
        return
    group.update_usage(columnwise_usage=False)
    if not FORMATS[name].columnwise_is_derivable:
        with pytest.raises(RuntimeError, match="columnwise"):
            group.update_usage(columnwise_usage=True)
        return
    assert group.storage.fields == FORMATS[name].rowwise.fields
    group.update_usage(columnwise_usage=True)
    assert_members(group, matrices, "derived")
    for field in FORMATS[name].columnwise.fields:
        assert group.members[0].storage.buffers[field.name].data_ptr() == getattr(group, field.name).data_ptr()


@every_format
def test_saving_for_backward_is_undone(name: str) -> None:
    group, x = sample(name), values(*SHAPE)
    tensors, shell = group.storage.prepare_for_saving()
    assert len(tensors) == len(FORMATS[name].canonical.fields)
    assert shell.restore_from_saved(tensors) == []
    assert_members(GroupedTensor(shell), x, "restored")


@of_each_family
@every_format
@pytest.mark.parametrize("shapes", [None, RAGGED], ids=["uniform", "ragged"])
def test_copies_have_bytes_of_their_own(name: str, shapes: Any) -> None:
    group, matrices = ragged(name) if shapes else (sample(name), list(values(*SHAPE)))
    group.members  # noqa: B018  (what is remembered of views is not copied)
    file = io.BytesIO()
    torch.save({"weight": group}, file)
    file.seek(0)
    copies = {
        "deepcopy": copy.deepcopy(group),
        "pickle": pickle.loads(pickle.dumps(group)),
        "torch.save": torch.load(file)["weight"],
        "clone": group.clone(),
        "to": group.to("cpu", copy=True),
        "parameter": copy.deepcopy(nn.Parameter(group)).data,
    }
    group.zero_()
    for how, copied in copies.items():
        assert type(copied) is GroupedTensor, how
        assert copied.shape == group.shape
        assert_members(copied, matrices, how)
        copied.zero_()
        assert not any(member.dequantize().any() for member in copied.members), how


def test_detached_is_another_object_of_the_same_bytes() -> None:
    group = sample("float8_block_2d")
    detached = group.detach()
    assert detached is not group
    assert detached.storage is group.storage
    param = nn.Parameter(group)
    assert param.detach() is not param
    assert param.data.storage is group.storage


def test_the_nominal_dtype_and_the_device_change_alone() -> None:
    group = sample("mxfp8_1d")
    assert group.float().dtype == torch.float32
    assert_members(group.float(), values(*SHAPE), "nominal dtype")
    on_meta = group.to("meta")
    assert on_meta.is_meta
    assert on_meta.shape == SHAPE
    assert grouped.empty([SHAPE[1:]] * 3, group.format, device="meta").row_data.is_meta


@every_format
def test_flattening_is_undone_with_the_strides_of_the_caller(name: str) -> None:
    strides = (1, 3 * 160, 3)
    group = GroupedTensor(sample(name).storage, strides=strides)
    assert group.stride() == strides
    assert group.detach().stride() == strides
    names, context = group.__tensor_flatten__()
    inner = {n: getattr(group, n) for n in names}
    back = GroupedTensor.__tensor_unflatten__(inner, context, group.shape, group.stride())
    assert back.stride() == strides
    assert back.equal(group)


def test_repr_says_what_it_is() -> None:
    text = repr(sample("float8_block_2d"))
    assert text.startswith(
        "GroupedTensor([3, 96, 160], 3 members of 96x160, bfloat16, cpu, {row_data: uint8[3, 96, 160]"
    )
    assert "3 members of 96x160, 32x160, 64x160" in repr(ragged("high_precision")[0])
    assert repr(sample("mxfp8_2d").storage).startswith("GroupedStorage(3 members of 96x160, rowwise+columnwise: row_")


@every_format
def test_joined_members_are_a_group(name: str) -> None:
    for shapes in ([SHAPE[1:]] * 3, RAGGED):
        matrices = [values(*shape, seed=seed) for seed, shape in enumerate(shapes)]
        assert_members(grouped.join([quantize(m, FORMATS[name]) for m in matrices]), matrices, "joined")


@every_format
def test_members_are_taken_out_without_a_copy(name: str) -> None:
    group, x = sample(name), values(*SHAPE)
    for how, members in {
        "unbind": group.unbind(),
        "index": [group[0], group[1], group[-1]],
        "for": list(group),
    }.items():
        for index, member in enumerate(members):
            assert type(member) is QuantizedTensor, how
            member.quantize_(3 * x[index])
        assert_members(group, 3 * x, how)
        group.quantize_(x)


@every_format
def test_parts_are_the_parts_of_every_member(name: str) -> None:
    group, x = sample(name), values(*SHAPE)
    two = group[1:3]
    assert_members(two, x[1:], "members")
    for dim, start, length in ((1, 32, 64), (2, 32, 96)):
        part = group.narrow(dim, start, length)
        assert part.shape[dim] == length
        for got, whole in zip(part.members, (quantize(m, FORMATS[name]) for m in x), strict=True):
            want = whole.narrow(dim - 1, start, length)
            for field, buffer in got.storage.buffers.items():
                assert_bitwise(buffer, want.storage.buffers[field], f"{field} along {dim}")
    assert [p.shape[0] for p in group.chunk(2)] == [2, 1]


@every_format
def test_reading_ops_give_what_they_give_on_the_values(name: str) -> None:
    group = sample(name)
    for op_name, op in present(["add.Tensor", "linalg_vector_norm.default", "sum.dim_IntList", "stack.default"]):
        args = arguments(op, group)
        for got, want in zip(leaves(op(*args)), leaves(op(*plain(args))), strict=True):
            assert_bitwise(got, want, op_name)


@every_format
def test_writing_ops_quantize_each_member_back(name: str) -> None:
    for op_name, op in present([*WRITING[:3], "mul_.Tensor", "zero_.default"]):
        target = sample(name)
        want = target.dequantize()
        assert op(*arguments(op, target)) is target, op_name
        op(*arguments(op, want))
        assert_members(target, want, op_name)


@every_format
def test_a_write_into_a_part_raises_and_into_a_member_does_not(name: str) -> None:
    group, want = sample(name), sample(name).dequantize()
    for part in (group[:2], group.narrow(1, 0, 32), group.chunk(3)[0], group.narrow(2, 0, 32)):
        for write in (part.zero_, lambda part=part: part.copy_(torch.ones(part.shape)), lambda part=part: part.mul_(2)):
            with pytest.raises(NotImplementedError, match=r"whole\.copy_\(values\).*clone the part"):
                write()
    assert_bitwise(group.dequantize(), want, "the whole")
    group[:2].clone().zero_()
    group[1] = 0.0
    want[1] = 0.0
    assert_bitwise(group.dequantize(), want, "a member")


@every_format
def test_averages_that_are_quantized_are_refused(name: str) -> None:
    group, other, average = (
        sample(name),
        torch.ones(SHAPE, dtype=torch.bfloat16),
        torch.zeros(SHAPE, dtype=torch.bfloat16),
    )
    for write in (lambda: group.lerp_(other, 0.5), lambda: torch._foreach_lerp_([average, group], [other, other], 0.5)):
        with pytest.raises(RuntimeError, match=r"lerp_.*stand still"):
            write()
    average.lerp_(group, 0.5)
    assert_bitwise(average, torch.zeros_like(average).lerp_(group.dequantize(), 0.5), "into a plain tensor")


def test_what_is_written_is_found_by_the_names_of_arguments() -> None:
    target, other = sample("float8_block_2d"), torch.full(SHAPE, 2.0, dtype=torch.bfloat16)
    want = target.dequantize() + other
    assert aten.add_.Tensor(other=other, self=target) is target
    assert_members(target, want, "by name")
    targets = [sample("mxfp8_1d"), torch.ones(2)]
    want = targets[0].dequantize() * 0.5
    aten._foreach_mul_.Scalar(scalar=0.5, self=targets)
    assert_members(targets[0], want, "in a list")
    assert_bitwise(targets[1], torch.full((2,), 0.5), "plain, in a list")


def test_the_table_has_every_op_of_values() -> None:
    listed = set(grouped.OPS.names())
    assert {f"aten.{n}" for n, _ in present([*READING, *COMPARING, *WRITING, *WRITING_LISTS, *AVERAGING])} <= listed
    elsewhere = {"aten.unsqueeze.default", "aten.squeeze.dim"}
    assert {op for op in set(OF_MATRICES.names()) - listed if not op.startswith("te_dist.")} == elsewhere


@pytest.mark.parametrize(
    ("call", "op"),
    [
        (lambda g: torch.bmm(g, torch.ones(3, SHAPE[2], 2, dtype=g.dtype)), "aten.bmm.default"),
        (lambda g: g.transpose(1, 2), "aten.transpose.int"),
        (torch.fft.fft, "aten._fft_r2c.default"),
    ],
    ids=["bmm", "transpose", "fft"],
)
def test_an_unknown_op_raises_with_its_name(call: Any, op: str) -> None:
    group = grouped.quantize(values(*SHAPE).float(), FORMATS["float8_block_2d"])
    with pytest.raises(NotImplementedError, match=op.replace(".", r"\.")):
        call(group)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: grouped.quantize([], FORMATS["mxfp8_1d"]), ValueError, "got no shapes"),
        (lambda: grouped.quantize(values(4, 32), FORMATS["mxfp8_1d"]), ValueError, "wanted .members, rows, cols"),
        (lambda: grouped.quantize([values(32)], FORMATS["mxfp8_1d"]), ValueError, "wanted a list of matrices"),
        (lambda: sample("mxfp8_1d").quantize_(values(2, 96, 160)), ValueError, "wanted the same; expand or view them"),
        (lambda: sample("mxfp8_1d").quantize_(list(values(2, 96, 160))), ValueError, "one for each, of its shape"),
        (lambda: ragged("mxfp8_1d")[0][:32], NotImplementedError, "without gaps|split the group"),
        (lambda: sample("mxfp8_1d").unbind(1), NotImplementedError, "out of dimension 0"),
        (lambda: grouped.join([]), ValueError, "one format"),
    ],
)
def test_what_cannot_be_grouped_is_refused(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


@every_format
def test_copying_moves_bytes_where_both_hold_the_same(name: str) -> None:
    source, target = sample(name), grouped.empty([SHAPE[1:]] * 3, FORMATS[name])
    source.storage.buffers[FORMATS[name].fields[0].name].view(torch.uint8).bitwise_xor_(1)
    target.copy_(source)
    assert target.equal(source)
    target.copy_(values(*SHAPE, seed=4))
    assert_members(target, values(*SHAPE, seed=4), "values")
    assert_bitwise(torch.empty(SHAPE).copy_(source), source.dequantize().float(), "into a plain tensor")


@every_format
def test_an_empty_group(name: str) -> None:
    group = sample(name)[:0]
    assert group.shape == (0, *SHAPE[1:])
    assert group.members == ()
    assert group.dequantize().shape == group.shape
    group.zero_()
    if Direction.COLUMNWISE in FORMATS[name]:
        assert group.clone().shape == group.shape


@every_format
def test_members_that_are_quantized_together_are_quantized_as_if_alone(name: str) -> None:
    # What CUDA does when the same is asked for again; here the batch runs on the CPU.
    group, x = sample(name), values(*SHAPE, seed=6)
    storage = group.storage
    together = storage_module._Together(storage.members, storage.split(x))
    for factor in (1, 4):
        x.mul_(factor)
        together.run()
        assert_members(group, x, f"times {factor}")


@every_format
@pytest.mark.parametrize("shapes", [None, RAGGED], ids=["uniform", "ragged"])
def test_what_is_parked_of_a_group_makes_it_anew(name: str, shapes: Any) -> None:
    group, matrices = ragged(name) if shapes else (sample(name), list(values(*SHAPE)))
    leaves_of_group, rebuild = take_apart(group)
    assert len(leaves_of_group) == len(FORMATS[name].canonical.fields)
    back = rebuild([leaf.clone() for leaf in leaves_of_group])
    assert type(back) is GroupedTensor
    assert back.storage.buffers.keys() == group.storage.buffers.keys()
    assert_members(back, matrices, "put together")


@every_format
def test_assigned_data_is_seen_by_whoever_holds_the_parameter(name: str) -> None:
    param, x = nn.Parameter(sample(name)), values(*SHAPE, seed=3)
    param.data = x
    assert_members(param, x, "values")
    other = grouped.quantize(2 * x, FORMATS[name])
    param.data = other
    assert param.storage is other.storage
    assert_members(param, 2 * x, "another group")
    with pytest.raises(ValueError, match="group of them"):
        param.data = quantize(x, FORMATS[name])
    assert_members(param, 2 * x, "as it was")
    assert len(param.split_into_quantized_tensors()) == SHAPE[0]


def test_gradients_of_members_values_are_the_groups() -> None:
    group = grouped.quantize(torch.randn(3, 128, 128), FORMATS["float8_block_2d"])
    weight = nn.Parameter(GroupedParameter(group.storage))
    for index, matrix in enumerate(weight.dequantize_members()):
        (matrix.sum() * index).backward()
    assert_bitwise(weight.grad, torch.arange(3.0)[:, None, None].expand(3, 128, 128).contiguous(), "gradient")
