"""Bitwise comparison: what is equal, and what the message says where it is not."""

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from te_dist.testing import assert_bitwise

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
)


def sample(dtype: torch.dtype) -> Tensor:
    """(3, 4) of ones."""
    return torch.ones(3, 4).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_tensors_pass_in_every_dtype(dtype: torch.dtype) -> None:
    assert_bitwise(sample(dtype), sample(dtype), "x")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_differing_coordinate_and_the_count_are_told(dtype: torch.dtype) -> None:
    got, want = sample(dtype), sample(dtype)
    got.view(-1)[6:8] = torch.zeros(2).to(dtype)
    with pytest.raises(AssertionError, match=r"scale: 2 of 12 elements of .* differ, the first at \(1, 2\): got .*0x"):
        assert_bitwise(got, want, "scale")


def test_value_and_bytes_of_both_sides_are_told() -> None:
    with pytest.raises(AssertionError, match=r"got 1\.0 \(0x3f800000\), want -2\.0 \(0xc0000000\)"):
        assert_bitwise(torch.tensor(1.0), torch.tensor(-2.0), "x")


def test_nan_equals_itself_but_not_another_nan() -> None:
    nan = torch.tensor([float("nan")])
    other = (nan.view(torch.int32) + 1).view(torch.float32)
    assert_bitwise(nan, nan.clone(), "x")
    with pytest.raises(AssertionError, match=r"nan \(0x7fc00000\), want nan \(0x7fc00001\)"):
        assert_bitwise(nan, other, "x")


def test_negative_zero_differs_from_zero() -> None:
    with pytest.raises(AssertionError, match=r"1 of 1 elements"):
        assert_bitwise(torch.tensor([0.0]), torch.tensor([-0.0]), "x")


def test_strides_do_not_matter() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert_bitwise(x.t().contiguous().t(), x, "x")


@pytest.mark.parametrize("shape", [(), (0,), (0, 3)], ids=str)
def test_scalars_and_empty_tensors_compare(shape: tuple[int, ...]) -> None:
    assert_bitwise(torch.zeros(shape), torch.zeros(shape), "x")


def test_shape_and_dtype_are_compared() -> None:
    with pytest.raises(AssertionError, match=r"x: got shape \(2,\), want \(2, 1\)"):
        assert_bitwise(torch.zeros(2), torch.zeros(2, 1), "x")
    with pytest.raises(AssertionError, match=r"x: got dtype torch.float32, want torch.uint8"):
        assert_bitwise(torch.zeros(2), torch.zeros(2, dtype=torch.uint8), "x")


def test_wrapper_subclasses_are_compared_by_their_inner_tensors() -> None:
    one = TwoTensor(torch.zeros(3), torch.zeros(3))
    other = TwoTensor(torch.zeros(3), torch.tensor([0.0, 0.0, 1.0]))
    assert_bitwise(one, TwoTensor(torch.zeros(3), torch.zeros(3)), "x")
    with pytest.raises(AssertionError, match=r"x\.b: 1 of 3 elements .* first at \(2,\)"):
        assert_bitwise(one, other, "x")
    with pytest.raises(AssertionError, match="got a TwoTensor, want a Tensor"):
        assert_bitwise(one, torch.zeros(3), "x")
