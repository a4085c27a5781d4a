"""What te_dist declares of cuBLASLt is what cublasLt.h declares. Needs that header, of the toolkit or of a wheel."""

from __future__ import annotations

import re
from importlib import metadata

import pytest

from te_dist import _C
from tests.csrc.abi import HOST, Declared

DECLARED = Declared(
    ("cublaslt_abi.h", "cublaslt.h"),
    "cublaslt_abi.cpp",
    ("cublasLt.h", "driver_types.h", "crt/host_defines.h"),
    ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cuda-crt"),
)
# Text of the headers, and what a mistake would make of it.
MISTAKES = [
    ("uint64_t data[8];", "uint64_t data[16];"),
    ("  size_t workspace_bytes;\n  Status status;", "  Status status;\n  size_t workspace_bytes;"),
    ("  float waves;\n", ""),
    ("int reserved[4];", "int reserved[3];"),
    ("uint64_t rows, uint64_t cols, int64_t pitch", "uint64_t rows, uint64_t cols"),
    ("const void* value, size_t bytes);\n  Status (*create_layout)", "const void* value);\n  Status (*create_layout)"),
    ("Layout c, Layout d, Preference, int count", "Layout c, Preference, int count"),
    ("void* workspace,\n                     size_t workspace_bytes, Stream", "void* workspace, Stream"),
]


@DECLARED.needs_header
def test_declarations_are_those_of_cublaslt():
    assert DECLARED.errors_with(HOST) == ""


@DECLARED.needs_header
@pytest.mark.parametrize(("right", "wrong"), [*MISTAKES, *DECLARED.mistaken_constants])
def test_a_mistake_is_found(tmp_path, right, wrong):
    assert "static assertion failed" in DECLARED.errors_of(right, wrong, tmp_path)


def library() -> str | None:
    """Where a wheel has put cuBLASLt."""
    for wheel in DECLARED.wheels:
        try:
            files = metadata.files(wheel) or ()
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name.startswith("libcublasLt.so"):
                return str(file.locate())
    return None


@pytest.mark.skipif(library() is None, reason="needs cuBLASLt, of a wheel")
@pytest.mark.parametrize("bias", ["", "bfloat16"])
def test_cublaslt_takes_what_describes_a_product(bias):
    """It does without a GPU, which is missed thereafter."""
    types, alignments = ("e4m3", "e5m2", "bfloat16", bias), (16, 16, 16, 16)
    how = dict(fast=True, accumulate=False, workspace_bytes=0)
    try:
        _C.cuda.Product(library(), 0, (8, 16, 32), (32, 32, 16), types, alignments, **how)
    except RuntimeError as error:
        assert not re.match("describing|setting", str(error))


def test_everything_declared_is_compared():
    assert not DECLARED.missing, f"compare them in {DECLARED.assertions}"
