"""What te_dist declares of DLPack is what torch's dlpack.h declares, and tensors are described by it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from te_dist import _C

HOST = Path(__file__).parents[2] / "csrc" / "host"
ASSERTIONS = Path(__file__).with_name("dlpack_abi.cpp")
TORCH = Path(torch.__file__).parent / "include"
CLASSES = (Tensor, torch.nn.Parameter)
# Text of dlpack_abi.h, and what a mistake would make of it.
MISTAKES = [
    ("kMajorVersion = 1", "kMajorVersion = 2"),
    ("  Device device;\n  int32_t num_dims;", "  int32_t num_dims;\n  Device device;"),
    ("int64_t* shape;\n  int64_t* strides;", "int64_t* strides;"),
    ("unused[3]", "unused[2]"),
]


def errors_with(headers: Path) -> str:
    """What the compiler says of the assertions over the headers of that folder."""
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{headers}", f"-isystem{TORCH}", str(ASSERTIONS)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@needs_compiler
def test_declarations_are_those_of_torch():
    assert errors_with(HOST) == ""


@needs_compiler
@pytest.mark.parametrize(("right", "wrong"), MISTAKES)
def test_a_mistake_is_found(tmp_path, right, wrong):
    declared = (HOST / "dlpack_abi.h").read_text()
    assert declared.count(right) == 1, f"{right!r} is no longer declared; mend the list of mistakes"
    (tmp_path / "dlpack_abi.h").write_text(declared.replace(right, wrong))
    assert "error" in errors_with(tmp_path)


def signature(*tensors: Tensor, alignment: int = 64) -> bytes | None:
    return _C.cuda.signature(tensors, CLASSES, alignment)


def test_tensors_that_are_alike_have_one_signature():
    x, y = torch.randn(4, 6), torch.nn.Parameter(torch.randn(4, 6))
    assert signature(x) == signature(y) != signature(x, y)
    whole = torch.randn(3, 128)
    assert signature(whole[0], whole[1]) == signature(whole[2], whole[1])


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, 6, dtype=torch.int32),
        torch.zeros(6, 4),
        torch.zeros(24),
        torch.zeros(1, 4, 6),
        torch.zeros(6, 4).t(),
        torch.zeros(4, 7)[:, :6],
        torch.zeros(25)[1:].view(4, 6),
    ],
)
def test_other_tensors_have_another(other):
    assert signature(torch.zeros(4, 6)) != signature(other)


def test_of_types_of_eight_bits_none_is_another():
    types = (torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
    assert len({signature(torch.empty(4, dtype=dtype)) for dtype in types}) == len(types)


def test_what_has_no_place_in_memory_has_none():
    assert signature(torch.zeros(2, device="meta")) is None
    assert signature(torch.zeros(2).to_sparse()) is None
    assert signature(torch.zeros(2).as_subclass(type("Other", (Tensor,), {}))) is None
