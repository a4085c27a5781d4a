"""Products of cuBLASLt, and programs of them, over a library that multiplies in host memory (fake_cuda.cpp).

In a process of its own, where it stands for CUDA's driver too.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from te_dist import _C
from te_dist.testing import WorkerPool

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
NO_BIAS = torch.empty(0)
PADDING = 16  # elements between rows of an output
FIELDS = [field.split(":")[0] for field in _C.cuda.Product.PARAMETERS.split()]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fake."""
    made = tmp_path_factory.mktemp("fake") / "libcuda.so.1"
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{ROOT}/csrc/host"]
    subprocess.run(["g++", *options, str(HERE / "fake_cuda.cpp"), "-o", str(made)], check=True)
    return str(made)


def test_products_are_those_of_the_values_and_what_does_not_fit_is_refused(library: str) -> None:
    own = WorkerPool(1)
    try:
        own.run(check_all, library, timeout=300)
    finally:
        own.close()


class Operands:
    """Of one product, with its output as it is before.

    `types`: of a, b and out, and of the bias, if any.
    """

    def __init__(self, extents: tuple[int, int, int], types: tuple[str, str, torch.dtype, bool], seed: int = 0) -> None:
        (rows, cols, depth), (a, b, out, has_bias) = extents, types
        draw = torch.Generator().manual_seed(seed)
        self.extents, self.types = extents, (a, b, NAMES[out], NAMES[out] if has_bias else "")
        self.values = [torch.randn(n, depth, generator=draw).to(FP8[t]) for n, t in ((rows, a), (cols, b))]
        self.scales = [torch.rand(1, generator=draw) + 0.5 for _ in range(2)]
        self.bias = torch.randn(cols, generator=draw).to(out) if has_bias else NO_BIAS
        self.out = torch.randn(rows, cols + PADDING, generator=draw).to(out)[:, :cols]

    @property
    def tensors(self) -> list[Tensor]:
        """In the order of the fields; the bias, if any, in front of the output."""
        (a, b), (a_scale, b_scale) = [x.view(torch.uint8) for x in self.values], self.scales
        return [a, a_scale, b, b_scale, *([self.bias] if self.types[3] else []), self.out]

    def product(self, library: str, *, accumulate: bool = False) -> _C.cuda.Product:
        keywords = dict(fast=False, accumulate=accumulate, workspace_bytes=0)
        pitches = self.extents[2], self.extents[2], self.extents[1] + PADDING
        return _C.cuda.Product(library, 0, self.extents, pitches, self.types, (16, 16, 16, 2), **keywords)

    def want(self, *, accumulate: bool) -> Tensor:
        product = self.values[0].double() @ self.values[1].double().t() * self.scales[0] * self.scales[1]
        product += self.bias.double() if self.types[3] else 0
        return product + self.out.double() if accumulate else product


def packed(operands: Operands) -> bytes:
    """Parameters of a launch: no workspace."""
    places = [tensor.data_ptr() for tensor in operands.tensors]
    bias = places[4] if operands.types[3] else 0
    return struct.pack("@7P", *places[:4], bias, 0, places[-1])


def check(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=2.0**-8 if got.dtype == torch.bfloat16 else 1e-5, atol=1e-4)


def multiply_all(library: str) -> None:
    f32, bf16 = torch.float32, torch.bfloat16
    cases = [
        ((8, 16, 32), ("e4m3", "e4m3", bf16, False), False),
        ((1, 48, 16), ("e4m3", "e4m3", bf16, True), False),
        ((5, 32, 64), ("e5m2", "e4m3", f32, False), True),
        ((7, 16, 48), ("e4m3", "e5m2", f32, False), False),
    ]
    for extents, types, accumulate in cases:
        operands, others = Operands(extents, types), Operands(extents, types, seed=1)
        product = operands.product(library, accumulate=accumulate)
        want = operands.want(accumulate=accumulate)
        product.launch(0, 0, (1, 1, 1), packed(operands))
        check(operands.out, want)
        # The same as a step of a program, on other tensors, the first of which is a part of a larger one.
        slots = range(len(others.tensors))
        fields = [name for name in FIELDS if name != "workspace" and (types[3] or name != "bias")]
        places = [8 * FIELDS.index(name) for name in fields]
        patches = [(place, slot, 0 if slot else 16, False) for slot, place in zip(slots, places, strict=True)]
        program = _C.cuda.Program([(product, (1, 1, 1), packed(operands), patches)], list(slots))
        want, codes = others.want(accumulate=accumulate), others.tensors[0]
        whole = torch.zeros(codes.numel() + 16, dtype=torch.uint8)
        whole[16:] = codes.flatten()
        before = operands.out.clone()
        program.run(0, 0, [whole, *others.tensors[1:]])
        check(others.out, want)
        assert torch.equal(operands.out, before)


def multiply_halves(library: str) -> None:
    """Of bf16, without scales, each as it lies."""
    draw = torch.Generator().manual_seed(3)
    rows, cols, depth = 5, 12, 7
    for a_turned, b_turned, out_type in product((False, True), (False, True), (torch.float32, torch.bfloat16)):
        a, b = (torch.randn(n, depth, generator=draw).bfloat16() for n in (rows, cols))
        stored = [x.t().contiguous() if turned else x for x, turned in ((a, a_turned), (b, b_turned))]
        out = torch.full((rows, cols), -7.0, dtype=out_type)
        types = "bfloat16", "bfloat16", NAMES[out_type], ""
        keywords = dict(fast=False, accumulate=False, workspace_bytes=0, turned=(a_turned, b_turned))
        pitches = (*(x.shape[1] for x in stored), cols)
        its = _C.cuda.Product(library, 0, (rows, cols, depth), pitches, types, (2, 2, 4, 2), **keywords)
        its.launch(
            0, 0, (1, 1, 1), struct.pack("@7P", stored[0].data_ptr(), 0, stored[1].data_ptr(), 0, 0, 0, out.data_ptr())
        )
        check(out, a.double() @ b.double().t())


def share_a_product(library: str) -> None:
    """Threads launch the same product at once, each with a scale of its own."""
    several = [Operands((8, 16, 32), ("e4m3", "e4m3", torch.float32, False), seed=seed) for seed in range(4)]
    product = several[0].product(library)

    def multiply_often(operands: Operands) -> bool:
        product.launch(0, 0, (1, 1, 1), packed(operands))
        first, parameters = operands.out.clone(), packed(operands)
        repeats = []
        for _ in range(50):
            product.launch(0, 0, (1, 1, 1), parameters)
            repeats.append(torch.equal(operands.out, first))
        check(operands.out, operands.want(accumulate=False))
        return all(repeats)

    with ThreadPoolExecutor(len(several)) as pool:
        assert all(pool.map(multiply_often, several))


def refuse_what_does_not_fit(library: str) -> None:
    odd = Operands((8, 16, 32), ("e5m2", "e5m2", torch.float32, False))
    with pytest.raises(RuntimeError, match=r"e5m2 \(8 x 32\) by e5m2 \(16 x 32\).*NOT_SUPPORTED"):
        odd.product(library)
    operands = Operands((8, 16, 32), ("e4m3", "e4m3", torch.float32, False))
    product = operands.product(library)
    right = packed(operands)
    wrong = right[:-8] + struct.pack("@P", operands.out.data_ptr() + 4)
    program = _C.cuda.Program([(product, (1, 1, 1), parameters, []) for parameters in (right, wrong, right)], [])
    with pytest.raises(RuntimeError, match=r"e4m3 \(8 x 32\).* as float32.*CUBLAS_STATUS_INVALID_VALUE \(fake\)"):
        program.run(0, 0, [])
    assert program.position == 1
    with pytest.raises(ValueError, match="takes one argument on device 0, got 1 on device 1"):
        product.launch(1, 0, (1, 1, 1), packed(operands))
    with pytest.raises(ValueError, match="an address behind the parameters of the product of e4m3"):
        _C.cuda.Program([(product, (1, 1, 1), packed(operands), [(56, 0, 0, False)])], [0])


def check_all(rank: int, world: int, library: str) -> None:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)  # found by its name from now on
    multiply_all(library)
    multiply_halves(library)
    share_a_product(library)
    refuse_what_does_not_fit(library)
