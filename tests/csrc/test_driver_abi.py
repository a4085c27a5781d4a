"""What te_dist declares of CUDA's driver is what cuda.h declares. Needs that header, of the toolkit or of a wheel."""

from __future__ import annotations

import pytest

from tests.csrc.abi import HOST, Declared

DECLARED = Declared(
    ("driver_abi.h", "driver.h"), "driver_abi.cpp", ("cuda.h",), ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
)
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


@DECLARED.needs_header
def test_declarations_are_those_of_cuda():
    assert DECLARED.errors_with(HOST) == ""


@DECLARED.needs_header
@pytest.mark.parametrize(("right", "wrong"), [*MISTAKES, *DECLARED.mistaken_constants])
def test_a_mistake_is_found(tmp_path, right, wrong):
    assert "static assertion failed" in DECLARED.errors_of(right, wrong, tmp_path)


def test_everything_declared_is_compared():
    assert not DECLARED.missing, f"compare them in {DECLARED.assertions}"
