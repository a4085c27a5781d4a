"""What tapes call in the place of ops of torch does the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from te_dist.kernels import tape
from te_dist.testing import assert_bitwise

aten = torch.ops.aten
END = 2**63 - 1  # as torch's dispatcher says it


def matrix() -> Tensor:
    return torch.arange(24.0).view(4, 6)


CALLS: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten.as_strided.default: [(([2, 3], [6, 1]), {}), (([3, 2, 2], [1, 12, 6], 1), {})],
    aten.select.int: [((0, 1), {}), ((1, -1), {})],
    aten.slice.Tensor: [
        ((), {}),
        ((0, 1), {}),
        ((1, 0, 3), {}),
        ((-1, -2, END), {}),
        ((0, 1, END, 2), {}),
        ((0, 2, 2), {}),
        ((0, 3, 99), {}),
        ((1, None, -1), {}),
    ],
    aten.t.default: [((), {})],
    aten.view.default: [(([24],), {})],
    aten.view.dtype: [((torch.int32,), {})],
    aten.arange.default: [],
    aten.cat.default: [],
    aten.clone.default: [((), {}), ((), {"memory_format": torch.contiguous_format})],
    aten.copy_.default: [((torch.ones(4, 6),), {}), ((torch.ones(6), True), {})],
    aten.div.Tensor: [((torch.full((6,), 3.0),), {}), ((3,), {})],
    aten.mul.Tensor: [((torch.full((6,), 3.0),), {}), ((3,), {})],
    aten.random_.to: [((1,), {})],  # nothing but zeros
    aten.split_with_sizes.default: [(([1, 3],), {}), (([2, 4], 1), {})],
    aten.zero_.default: [((), {})],
}


def test_every_op_has_calls() -> None:
    assert CALLS.keys() == tape._QUICK.keys()


@pytest.mark.parametrize("op", CALLS, ids=str)
def test_what_is_quick_does_the_same(op: Any) -> None:
    for args, kwargs in CALLS[op]:
        first, second = matrix(), matrix()
        got, want = tape._QUICK[op](first, *args, **kwargs), op(second, *args, **kwargs)
        for one, other in zip(as_list(got), as_list(want), strict=True):
            assert_bitwise(one, other, f"{op} of {args}")
            assert one.stride() == other.stride()
            if op in tape._VIEWS:
                assert one.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
                assert one.storage_offset() == other.storage_offset()
        assert_bitwise(first, second, f"what {op} of {args} wrote")


@pytest.mark.parametrize("dim", [(), (0,), (1,)])
def test_what_is_joined_is_the_same(dim: tuple[int, ...]) -> None:
    given = [matrix(), matrix().long()]
    assert_bitwise(tape._QUICK[aten.cat.default](given, *dim), aten.cat.default(given, *dim), str(dim))


def test_what_counts_is_the_same() -> None:
    for options in ({}, {"dtype": torch.float32, "device": "cpu", "layout": torch.strided, "pin_memory": False}):
        got, want = (call(5, **options) for call in (tape._QUICK[aten.arange.default], aten.arange.default))
        assert_bitwise(got, want, str(options))


def as_list(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)
