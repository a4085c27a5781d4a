"""What te_dist declares of cuBLASLt is what cublasLt.h declares. Needs that header, of the toolkit or of a wheel."""

from __future__ import annotations

import pytest

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


def test_everything_declared_is_compared():
    assert not DECLARED.missing, f"compare them in {DECLARED.assertions}"
