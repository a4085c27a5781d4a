"""On a GPU a call gives the right bytes or raises before anything is launched, whatever it is given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist.testing import assert_bitwise
from tests.gpu.catalog import Call, catalog
from tests.gpu.each_op import of_each_op, tensors, with_tensor
from tests.gpu.twins import assert_same, whole
from tests.ops.foreign_tables import check_foreign, foreign_calls
from tests.ops.no_groups import NoGroups

pytestmark = pytest.mark.gpu

CALLS = catalog()


def check_like_cpu(got: Call, want: Call) -> None:
    """Runs both and compares all that their outputs' storages hold; a NaN may have another payload."""
    want.run()
    got.run()
    for name, expected in want.outputs.items():
        assert_same(got.outputs[name].cpu(), expected, f"{name} of {want.name}")
        if not expected.is_floating_point():
            assert_bitwise(whole(got.outputs[name]), whole(expected), f"storage of {name} of {want.name}")


def test_every_call_gives_the_bytes_of_the_cpu():
    for call in CALLS:
        if call.is_exact:
            check_like_cpu(call.on("cuda"), call)


@pytest.mark.parametrize("call", of_each_op(), ids=lambda call: call.name)
def test_tensors_of_two_devices_are_refused(call):
    on_gpu = call.on("cuda")
    names = dict.fromkeys(name for name, _ in tensors(call))
    assert len(names) > 1
    for name in names:
        mixed = with_tensor(on_gpu, name, lambda tensor: tensor.cpu())
        with pytest.raises(ValueError, match="(cpu|cuda:0).* wanted (all of them on one device|one element on)"):
            mixed.run()


def wrong_dtype(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64)


def more_rows(tensor: Tensor) -> Tensor:
    return torch.zeros((tensor.shape[0] + 1, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)


def one_dimension_more(tensor: Tensor) -> Tensor:
    return tensor[None]


def gaps(tensor: Tensor) -> Tensor:
    return torch.stack((tensor, tensor), -1)[..., 0]


def fewer_columns_of_wider_rows(tensor: Tensor) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, 3))[..., :-3]


CHANGES = [wrong_dtype, more_rows, one_dimension_more, gaps, fewer_columns_of_wider_rows]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", of_each_op(), ids=lambda call: call.name)
def test_what_does_not_fit_is_refused_and_what_is_taken_is_right(call, change):
    for name in dict.fromkeys(name for name, _ in tensors(call)):
        odd = with_tensor(call.on("cuda"), name, change)
        try:
            odd.run()
        except (ValueError, RuntimeError, TypeError) as error:
            assert "CUDA error" not in str(error)
        else:
            same = with_tensor(call if call.is_exact else call.on("cuda"), name, lambda t: change(t).contiguous())
            same.run()
            for key, output in odd.outputs.items():
                assert_bitwise(output.contiguous().cpu(), same.outputs[key].contiguous().cpu(), f"{key} for {name}")
    torch.cuda.synchronize()


@pytest.mark.parametrize("call", foreign_calls(), ids=lambda call: call.op.__name__)
def test_a_table_of_more_rows_than_there_are_ends_with_the_matrix(call):
    got = call.on("cuda")
    call.run()
    check_foreign(got, call)


def test_no_groups():
    NoGroups("cuda").check()


def test_ops_run_on_the_stream_that_is_current():
    side = torch.cuda.Stream()
    for call in of_each_op():
        on_gpu, blank = call.on("cuda"), call.on("cuda")
        on_gpu.run()
        name, tensor = next(tensors(blank))
        values = tensor.clone()
        tensor.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            tensor.copy_(values)
            blank.run()
        side.synchronize()
        for key, output in blank.outputs.items():
            assert_bitwise(output.contiguous(), on_gpu.outputs[key].contiguous(), f"{key} of {call.name}")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_ops_run_where_their_tensors_are():
    for call in of_each_op():
        there = call.on("cuda:1")
        check_like_cpu(there, call) if call.is_exact else there.run()
    assert torch.cuda.current_device() == 0
