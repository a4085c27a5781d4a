"""The storage tracker counts bytes that are alive, once, and sees what FSDP2 and autograd do with them."""

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from te_dist.testing import StorageTracker
from te_dist.testing.memory import allocated_bytes, storages


def test_what_is_still_referenced_is_alive_and_the_rest_is_not() -> None:
    with StorageTracker() as tracker:
        kept = torch.empty(10, dtype=torch.float32)
        dropped = torch.empty(1000)
        del dropped
        assert tracker.bytes_alive() == 40
    assert tracker.bytes_alive() == 40
    del kept
    assert tracker.bytes_alive() == 0


def test_views_count_once() -> None:
    with StorageTracker() as tracker:
        x = torch.zeros(4, 4)
        views = [x.t(), x[1:], x.view(-1), x.detach()]
    assert len(views) == 4
    assert tracker.bytes_alive() == 64


def test_a_view_keeps_the_whole_storage_alive() -> None:
    with StorageTracker() as tracker:
        corner = torch.zeros(100, 100)[:1, :1]
    assert corner.numel() == 1
    assert tracker.bytes_alive() == 40_000


def test_tensors_from_before_the_block_do_not_count() -> None:
    old = torch.zeros(100)
    with StorageTracker() as tracker:
        old.add_(1)
        old.view(10, 10)
    assert tracker.alive() == []


def test_storage_resize_is_followed_both_ways() -> None:
    old = torch.zeros(100)
    new_size = old.untyped_storage().nbytes()
    old.untyped_storage().resize_(0)
    with StorageTracker() as tracker:
        old.untyped_storage().resize_(new_size)
        assert tracker.bytes_alive() == 400
        x = torch.zeros(8)
        x.untyped_storage().resize_(0)
        old.untyped_storage().resize_(0)
        assert tracker.bytes_alive() == 0
    x.untyped_storage().resize_(32)
    assert tracker.bytes_alive() == 32


def test_tensor_resize_of_an_older_tensor_counts_its_growth() -> None:
    old = torch.zeros(10)
    with StorageTracker() as tracker:
        old.resize_(30)
    assert tracker.bytes_alive() == 80


def test_resize_is_torchs_own_again_after_the_block() -> None:
    before = torch.UntypedStorage.resize_
    with StorageTracker():
        assert torch.UntypedStorage.resize_ is not before
    assert torch.UntypedStorage.resize_ is before
    assert "resize_" not in vars(torch.UntypedStorage)


def test_what_autograd_saved_is_alive_until_backward() -> None:
    weight = torch.zeros(16, requires_grad=True)
    with StorageTracker() as tracker:
        loss = (weight * 2).exp().sum()
        assert tracker.bytes_alive() == 64 + 4  # exp saves its result
        loss.backward()
    tracker.assert_alive(0, besides=[loss, weight.grad])


def test_ops_of_backward_are_seen() -> None:
    leaked: list[Tensor] = []
    weight = torch.zeros(16, requires_grad=True)
    weight.register_hook(lambda grad: leaked.append(grad * 3))
    with StorageTracker() as tracker:
        weight.sum().backward()
    assert tracker.bytes_alive(besides=[weight.grad]) == 64
    assert len(leaked) == 1


def test_wrapper_subclasses_count_by_their_inner_tensors() -> None:
    x = TwoTensor(torch.zeros(4), torch.zeros(4))
    with StorageTracker() as tracker:
        y = x + 1
    assert tracker.bytes_alive() == 32
    assert tracker.bytes_alive(besides=[y]) == 0
    assert allocated_bytes([x, y, None, x.a]) == 64
    assert len(storages([x, x.a, x.b])) == 2


def test_the_message_lists_every_allocation_with_its_origin() -> None:
    with StorageTracker() as tracker:
        x = torch.zeros(3, 5, dtype=torch.bfloat16)
    assert x.shape == (3, 5)
    with pytest.raises(
        AssertionError, match=r"30 bytes are alive in 1 storages, want 0:\n  30 bytes, bfloat16\[3, 5\]"
    ):
        tracker.assert_alive(0)
    (allocation,) = tracker.alive()
    assert allocation.op.startswith("aten.zeros")
    assert "test_memory.py:" in allocation.place


def test_trackers_nest() -> None:
    with StorageTracker() as outer:
        x = torch.zeros(2)
        with StorageTracker() as inner:
            y = torch.zeros(3)
            x.untyped_storage().resize_(16)
    assert (outer.bytes_alive(), inner.bytes_alive()) == (16 + 12, 12 + 8)
    assert y.numel() == 3
