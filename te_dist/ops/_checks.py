"""Argument checks of the op wrappers. Kernels trust their arguments, so everything that could go wrong stops here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import ParamSpec, Protocol

import torch
from torch import Tensor

from te_dist.formats import WHOLE
from te_dist.formats.region import Pair

P = ParamSpec("P")

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
FP8 = ("e4m3", "e5m2")


def takes(kind: type) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorates an op whose keywords are, besides those it names, the keys of a TypedDict.

    Others, and those that are missing, raise TypeError: they would be passed over, or be found one after the other.
    """
    keys, required = frozenset(kind.__optional_keys__ | kind.__required_keys__), kind.__required_keys__

    def decorate(op: Callable[P, None]) -> Callable[P, None]:
        named = frozenset(inspect.signature(op).parameters)

        @wraps(op)
        def checked(*args: P.args, **keywords: P.kwargs) -> None:
            given = set(keywords)  # compilers of torch 2.11 know no difference of keys
            unknown, missing = given - keys - named, required - given
            if unknown or missing:
                found = {"unknown": sorted(unknown), "missing": sorted(missing)}
                wrong = " and ".join(f"{what} keywords {names}" for what, names in found.items() if names)
                raise TypeError(
                    f"{op.__name__}: {wrong}; it takes {', '.join(sorted(keys))}, see {kind.__module__}.{kind.__name__}"
                )
            op(*args, **keywords)

        return checked

    return decorate


def tiles_touched(length: int, phase: int, tile: int) -> int:
    """Tiles that `length` elements touch, the first of which lies `phase` elements behind the start of its tile."""
    if tile == WHOLE:
        return 1
    return (phase % tile + length - 1) // tile + 1 if length else 0


def grid_shape(shape: Sequence[int], phase: Sequence[int], tile: Sequence[int]) -> Pair:
    """Extents of the grid of `tile`s over a matrix of `shape`."""
    return _grid_shape(*shape, *phase, *tile)


@lru_cache(maxsize=4096)
def _grid_shape(rows: int, cols: int, *place: int) -> Pair:
    row_phase, col_phase, *tile = place
    return tiles_touched(rows, row_phase, tile[0]), tiles_touched(cols, col_phase, tile[1])


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if (tuple(value) if isinstance(value, list) else value) not in choices:
        raise ValueError(f"{name}: got {value!r}; choose one of {', '.join(map(repr, choices))}")


def check_types(fp8: Sequence[str]) -> None:
    """Of the FP8 codes of both operands of a product."""
    if isinstance(fp8, str) or len(fp8) != 2 or any(each not in FP8 for each in fp8):
        raise ValueError(f"fp8: got {fp8!r}, wanted the types of a and of b, each one of {', '.join(map(repr, FP8))}")


def extents(name: str, tensor: Tensor) -> Pair:
    """(rows, columns) of what is a matrix."""
    if tensor.dim() != 2:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, wanted 2 dimensions; flatten the leading ones")
    return tensor.shape[0], tensor.shape[1]


def check_matrix(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype] = HIGH_PRECISION) -> None:
    """A contiguous 2-D tensor of one of `dtypes`."""
    if tensor.dtype in dtypes and tensor.dim() == 2 and tensor.is_contiguous():
        return
    check_dtype(name, tensor, dtypes)
    extents(name, tensor)
    raise ValueError(f"{name}: got strides {tensor.stride()}, wanted a contiguous matrix; call .contiguous()")


def check_dtype(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name}: got {tensor.dtype}, wanted {wanted}; convert or view it as such")


class Shaped(Protocol):
    """A tensor, or what stands for a matrix."""

    @property
    def shape(self) -> Sequence[int]: ...


def check_shape(name: str, tensor: Shaped, shape: Sequence[int]) -> None:
    if tensor.shape != tuple(shape):
        raise ValueError(
            f"{name}: got shape {tuple(tensor.shape)}, wanted {tuple(shape)}; allocate it as its field declares"
        )


def check_product(out: Tensor, shape: Pair, accumulate: bool) -> None:
    """Where a product goes; what is added up is added in fp32."""
    check_rows("out", out, (torch.float32,) if accumulate else HIGH_PRECISION, shape)


def check_packed(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int]) -> None:
    """A contiguous tensor of exactly this shape."""
    check_dtype(name, tensor, dtypes)
    check_shape(name, tensor, shape)
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: got strides {tensor.stride()}, wanted it contiguous; call .contiguous()")


def check_plane(name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """A strided 2-D view in logical (row, col) order."""
    if tensor.dtype is not dtype or tensor.shape != shape:
        check_dtype(name, tensor, (dtype,))
        check_shape(name, tensor, shape)


def check_output(name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """A contiguous matrix of exactly this dtype and shape."""
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous():
        check_matrix(name, tensor, (dtype,))
        check_shape(name, tensor, shape)


def check_rows(
    name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int], *, at_least: bool = False
) -> None:
    """A matrix of `shape` with contiguous rows; or of more rows and columns than that, where that is allowed."""
    check_dtype(name, tensor, dtypes)
    if at_least and tensor.dim() == 2 and all(have >= want for have, want in zip(tensor.shape, shape, strict=True)):
        shape = tuple(tensor.shape)
    check_shape(name, tensor, shape)
    if tensor.numel() and tensor.stride(1) != 1 and tensor.shape[1] > 1:
        raise ValueError(f"{name}: got strides {tensor.stride()}, wanted contiguous rows; call .contiguous()")
