"""Comparison of tensors by their bytes, with a message that says where they part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from te_dist._torch_private import is_traceable_wrapper_subclass


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor of which each rank may have a part. Collective, where this is a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_bitwise(got: Tensor, want: Tensor, name: str) -> None:
    """Asserts that two tensors have the same shape, dtype and bytes: NaN equals the same NaN, 0.0 differs from -0.0.

    Strides and devices may differ. Tensors made of inner tensors (a DTensor, say) are compared inner by inner.

    Args:
        got: the tensor under test.
        want: what it should be.
        name: what the tensors are, for the message.

    Raises:
        AssertionError: names both types, shapes or dtypes, or the number of differing elements, the coordinate of the
            first one and both its values with their bytes.
    """
    if is_traceable_wrapper_subclass(got) or is_traceable_wrapper_subclass(want):
        _assert_inner_bitwise(got, want, name)
        return
    assert got.dtype == want.dtype, f"{name}: got dtype {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"{name}: got shape {tuple(got.shape)}, want {tuple(want.shape)}"
    got_bytes, want_bytes = _bytes(got), _bytes(want)
    differs = (got_bytes != want_bytes).any(dim=1)
    count = int(differs.sum())
    if count == 0:
        return
    first = int(differs.nonzero()[0])
    coordinate = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), got.shape))
    raise AssertionError(
        f"{name}: {count} of {got.numel()} elements of {got.dtype} differ, the first at {coordinate}: "
        f"got {_show(got_bytes[first], got.dtype)}, want {_show(want_bytes[first], want.dtype)}"
    )


def _assert_inner_bitwise(got: Tensor, want: Tensor, name: str) -> None:
    """`assert_bitwise` for wrapper subclasses, by their inner tensors."""
    assert type(got) is type(want), f"{name}: got a {type(got).__name__}, want a {type(want).__name__}"
    assert got.shape == want.shape, f"{name}: got shape {tuple(got.shape)}, want {tuple(want.shape)}"
    got_names, want_names = inner_names(got), inner_names(want)
    assert got_names == want_names, f"{name}: got inner tensors {got_names}, want {want_names}"
    for inner in got_names:
        assert_bitwise(getattr(got, inner), getattr(want, inner), f"{name}.{inner}")


def inner_names(tensor: Any) -> list[str]:
    """Attributes of a wrapper subclass that hold its inner tensors."""
    return tensor.__tensor_flatten__()[0]


def _bytes(tensor: Tensor) -> Tensor:
    """(numel, itemsize) bytes of a tensor, in logical order, on the CPU."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    plain = plain.clone(memory_format=torch.contiguous_format)  # also where one element has a stride
    return plain.view(torch.uint8).reshape(-1, tensor.dtype.itemsize)


def _show(element: Tensor, dtype: torch.dtype) -> str:
    """Value and bytes (most significant first) of one element given as bytes."""
    digits = bytes(element.flip(0).tolist()).hex()
    try:
        return f"{element.contiguous().view(dtype).item()} (0x{digits})"
    except (NotImplementedError, RuntimeError):
        return f"0x{digits}"
