"""What te_dist declares of CUDA's driver is what cuda.h declares. Needs that header, of the toolkit or of a wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

HOST = Path(__file__).parents[2] / "csrc" / "host"
ASSERTIONS = Path(__file__).with_name("driver_abi.cpp")
WHEELS = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
TOOLKIT = Path("/usr/local/cuda/include")

CONSTANT = re.compile(r"\b(k[A-Z]\w+) = (\d+)")
# Text of driver_abi.h or driver.h, and what a mistake would make of it.
MISTAKES = [
    ("unsigned grid_x, grid_y, grid_z;", "unsigned grid_x, grid_z, grid_y;"),
    ("unsigned shared_bytes;", "uint64_t shared_bytes;"),
    ("  Stream stream;\n  LaunchAttribute* attributes;", "  LaunchAttribute* attributes;\n  Stream stream;"),
    ("char pad[64];", "char pad[72];"),
    ("struct alignas(128) TensorMap", "struct TensorMap"),
    ("(*replace_address)(TensorMap*, void* address)", "(*replace_address)(TensorMap*, unsigned address)"),
    ("(*init)(unsigned flags)", "(*init)(unsigned flags, int)"),
    ("int l2_promotion, int out_of_bounds_fill", "int l2_promotion"),
]


def include_folder() -> Path | None:
    """Where cuda.h lies; None where it is not installed."""
    for wheel in WHEELS:
        try:
            files = metadata.files(wheel) or ()
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == "cuda.h":
                return Path(str(file.locate())).parent
    return TOOLKIT if (TOOLKIT / "cuda.h").exists() else None


def errors_with(headers: Path) -> str:
    """What the compiler says of the assertions over the headers of that folder."""
    folders = [f"-I{headers}", f"-isystem{include_folder()}"]
    command = ["g++", "-std=c++17", "-fsyntax-only", *folders, str(ASSERTIONS)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


needs_header = pytest.mark.skipif(
    include_folder() is None or shutil.which("g++") is None, reason="needs g++ and cuda.h (extra cuda13, or a toolkit)"
)


def declared() -> str:
    return "\n".join((HOST / name).read_text() for name in ("driver_abi.h", "driver.h"))


@needs_header
def test_declarations_are_those_of_cuda():
    assert errors_with(HOST) == ""


@needs_header
@pytest.mark.parametrize(
    ("right", "wrong"),
    [*MISTAKES, *((f"{name} = {value}", f"{name} = {int(value) + 1}") for name, value in CONSTANT.findall(declared()))],
)
def test_a_mistake_is_found(tmp_path, right, wrong):
    assert declared().count(right) == 1, f"{right!r} is no longer declared; mend the list of mistakes"
    for name in ("driver_abi.h", "driver.h"):
        (tmp_path / name).write_text((HOST / name).read_text().replace(right, wrong))
    assert "static assertion failed" in errors_with(tmp_path)


def test_everything_declared_is_compared():
    assertions = ASSERTIONS.read_text()
    names = [name for name, _ in CONSTANT.findall(declared())]
    names += re.findall(r"\(\*(\w+)\)\(", declared())
    missing = [name for name in names if not re.search(rf"\b{name}\b", assertions)]
    assert not missing, f"compare {missing} with cuda.h in {ASSERTIONS.name}"
