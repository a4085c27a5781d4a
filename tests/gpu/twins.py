"""The same op on CPU and GPU tensors, compared byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from te_dist.kernels import tape
from te_dist.testing import assert_bitwise

POISON = 77


@contextmanager
def unrecorded() -> Iterator[None]:
    """A block that finds everything out itself, and plays no tape: for what is wanted of those that do."""
    with mock.patch.object(tape, "is_recordable", lambda _: False):
        yield


def on_gpu(tensor: Tensor) -> Tensor:
    """A copy of a tensor and of all that its storage holds, at the same strides and offset."""
    storage = tensor.untyped_storage().cuda()
    target = torch.empty(0, dtype=tensor.dtype, device="cuda")
    return target.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def whole(tensor: Tensor) -> Tensor:
    """All that a tensor's storage holds, padding included, as bytes on the CPU."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage().cpu())


def shifted(tensor: Tensor, elements: int) -> Tensor:
    """The same matrix, contiguous, that many elements behind the start of its storage."""
    buffer = torch.full((elements + tensor.numel(),), POISON, dtype=torch.float32).to(tensor.dtype)
    buffer[elements:] = tensor.reshape(-1)
    return buffer[elements:].view(tensor.shape)


def assert_same(got: Tensor, want: Tensor, name: str) -> None:
    """`assert_bitwise`, but a NaN among floats may have another sign and payload."""
    if want.is_floating_point():
        assert torch.equal(got.isnan(), want.isnan()), f"{name}: NaN in other places"
        got, want = (torch.where(tensor.isnan(), torch.zeros_like(tensor), tensor) for tensor in (got, want))
    assert_bitwise(got, want, name)


def poison(outputs: dict[str, Tensor]) -> None:
    for tensor in outputs.values():
        tensor.fill_(POISON)


def check_twins(op: Callable[..., None], outputs: dict[str, Tensor], name: str, **inputs: Any) -> None:
    """Runs `op` on CPU and GPU and asserts that all of the outputs' storages are equal; the GPU runs twice."""
    poison(outputs)
    op(**inputs, **outputs)
    on_device = {key: on_gpu(value) if isinstance(value, Tensor) else value for key, value in inputs.items()}
    got = {key: on_gpu(value) for key, value in outputs.items()}
    for turn in range(2):
        poison(got)
        op(**on_device, **got)
        for key, want in outputs.items():
            assert_bitwise(got[key].cpu(), want.contiguous(), f"{key} of {name}, turn {turn}")
            assert_bitwise(whole(got[key]), whole(want), f"storage of {key} of {name}, turn {turn}")
