"""How products with one scale are launched: what cuBLASLt is told of them, once, and where it finds what."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.kernels import gemm_tensor, runtime, tape
from te_dist.kernels.tape import Tapes
from tests.kernels.test_tape import Program

FIELDS = [field.split(":")[0] for field in _C.cuda.Product.PARAMETERS.split()]


class Library:
    """In the place of cuBLASLt: notes which products were made and launched; refuses where it is told to."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.launched: list[dict[str, int]] = []
        self.refuses = False

    def product(self, library: str, device: int, *spec: Any, **how: Any) -> Library:
        self.made.append(dict(zip(("extents", "pitches", "types", "alignments"), spec, strict=True)) | how)
        return self

    def launch(self, device: int, stream: int, grid: Any, parameters: bytes) -> None:
        if self.refuses:
            raise RuntimeError("no")
        self.launched.append(dict(zip(FIELDS, struct.unpack("@7P", parameters), strict=True)))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    fake = Library()
    monkeypatch.setattr(gemm_tensor._C.cuda, "Product", fake.product)
    monkeypatch.setattr(gemm_tensor, "_library", lambda: "fake")
    monkeypatch.setattr(runtime, "current_cuda_stream", lambda device: 0)
    gemm_tensor._product.cache_clear()
    yield fake
    gemm_tensor._product.cache_clear()


def at(shape: tuple[int, ...], dtype: torch.dtype, num_bytes: int) -> Tensor:
    """Zeros at an address that much behind a multiple of 256."""
    numel = torch.Size(shape).numel()
    whole = torch.zeros(numel * dtype.itemsize + 256 + num_bytes, dtype=torch.uint8)
    start = -whole.data_ptr() % 256 + num_bytes
    return whole[start : start + numel * dtype.itemsize].view(dtype).view(shape)


def multiply(places: tuple[int, int, int, int], **rest: Any) -> dict[str, Tensor | None]:
    """A product of tensors at these places; returns them by field."""
    given = dict(rows=8, bias=None, fast=False, accumulate=False, workspace=None) | rest
    a, b = at((given["rows"], 32), torch.uint8, places[0]), at((48, 32), torch.uint8, places[1])
    out = at((given["rows"], 48), torch.bfloat16, places[2])
    bias = at((48,), torch.bfloat16, places[3]) if given["bias"] else None
    scales = torch.ones(1), torch.ones(1)
    how = (bias, given["fast"], given["accumulate"], given["workspace"], out)
    kernels.gemm_float8_tensor(a, scales[0], b, scales[1], ("e4m3", "e5m2"), *how)
    tensors = (a, scales[0], b, scales[1], bias, given["workspace"], out)
    return dict(zip(FIELDS, tensors, strict=True))


def test_a_workspace_anywhere_is_refused(library: Library) -> None:
    with pytest.raises(ValueError, match="workspace: got address .*, wanted a multiple of 256"):
        multiply((0, 0, 0, 0), workspace=at((256,), torch.uint8, 16))


def test_a_product_is_made_once_for_places_that_are_alike(library: Library) -> None:
    for places in ((0, 16, 32, 2), (128, 144, 160, 130), (256, 16, 32, 2)):
        given = multiply(places, bias=True, fast=True)
        want = {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in given.items()}
        assert library.launched[-1] == want
    (made,) = library.made
    assert made == dict(
        extents=(8, 48, 32),
        pitches=(32, 32, 48),
        types=("e4m3", "e5m2", "bfloat16", "bfloat16"),
        alignments=(128, 16, 32, 2),
        fast=True,
        accumulate=False,
        workspace_bytes=0,
        turned=(False, False),
    )


@pytest.mark.parametrize("summed", [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_halves_are_multiplied_as_they_lie(library: Library, summed: tuple[int, int]) -> None:
    stored = [(n, 32) if dim else (32, n) for n, dim in zip((8, 48), summed, strict=True)]
    a, b = (at(shape, torch.bfloat16, 0) for shape in stored)
    out, workspace = at((8, 48), torch.float32, 64), at((512,), torch.uint8, 0)
    kernels.gemm_half(a, b, summed, True, workspace, out)
    places = dict(a=a.data_ptr(), b=b.data_ptr(), workspace=workspace.data_ptr(), out=out.data_ptr())
    assert library.launched == [dict.fromkeys(FIELDS, 0) | places]
    made = dict(extents=(8, 48, 32), pitches=(stored[0][1], stored[1][1], 48), alignments=(128, 128, 64, 128))
    made |= dict(types=("bfloat16", "bfloat16", "float32", ""), fast=False, accumulate=True, workspace_bytes=512)
    assert library.made == [made | dict(turned=(summed[0] == 0, summed[1] == 0))]


@pytest.mark.parametrize(
    ("places", "rest"),
    [
        ((16, 0, 0, 0), {}),
        ((0, 0, 64, 0), {}),
        ((0, 0, 0, 0), dict(rows=9)),
        ((0, 0, 0, 0), dict(bias=True)),
        ((0, 0, 0, 0), dict(fast=True)),
        ((0, 0, 0, 0), dict(accumulate=True)),
        ((0, 0, 0, 0), dict(workspace=at((256,), torch.uint8, 0))),
    ],
)
def test_another_product_is_another(library: Library, places: tuple[int, int, int, int], rest: dict[str, Any]) -> None:
    for _ in range(2):
        multiply((0, 0, 0, 0))
        multiply(places, **rest)
    assert len(library.made) == 2
    assert library.made[0] != library.made[1]


def test_a_product_on_a_tape_finds_its_operands_again(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "is_recordable", lambda tensor: not tape.is_dispatch_watched())
    monkeypatch.setattr(tape, "current_cuda_stream", lambda device: 0)
    monkeypatch.setattr(tape, "Program", Program)
    tapes = Tapes()
    for number in range(3):
        a, b = (at((rows, 32), torch.uint8, 0) for rows in (8, 48))
        scales = at((1,), torch.float32, 0), at((1,), torch.float32, 0)

        def function(a: Tensor = a, b: Tensor = b, scales: tuple[Tensor, Tensor] = scales) -> Any:
            out = torch.empty(8, 48, dtype=torch.bfloat16)
            how = ("e4m3", "e4m3"), None, True, False, None, out
            kernels.gemm_float8_tensor(a, scales[0], b, scales[1], *how)
            return (out,), None

        (out,), _ = tapes.run("product", (a, b, *scales), function)
        tensors = dict(a=a, a_scale=scales[0], b=b, b_scale=scales[1], out=out)
        want = dict.fromkeys(FIELDS, 0) | {name: tensor.data_ptr() for name, tensor in tensors.items()}
        assert library.launched[number] == want
    assert None not in tapes._tapes.values()


def test_a_product_that_fails_tells_where_its_operands_are(library: Library) -> None:
    library.refuses = True
    with pytest.raises(RuntimeError, match=r"no; arguments a=\d+, a_scale=\d+, .* bias=0, workspace=0, out=\d+"):
        multiply((0, 0, 0, 0))


def test_odd_addresses_are_refused(library: Library) -> None:
    for places, name in (((8, 0, 0, 0), "a"), ((0, 8, 0, 0), "b"), ((0, 0, 2, 0), "out")):
        with pytest.raises(ValueError, match=f"{name}: got address .* multiples of 16"):
            multiply(places)
    assert not library.made
