"""Where kernels cannot be compiled the message says what to install, and CPU tensors are none the worse."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from te_dist import ops
from te_dist.formats import WHOLE
from te_dist.kernels import CompilerError, compiler, movement, runtime
from te_dist.kernels.spec import Spec

INSTALL = r"install te_dist with its extra cuda13"


def no_cupy(name):
    raise ModuleNotFoundError(f"No module named {name!r}")


def no_nvrtc(_):
    def version():
        raise RuntimeError("Failed to dlopen libnvrtc.so.13\n  searched in many folders")

    return SimpleNamespace(getVersion=version)


@pytest.fixture(params=[no_cupy, no_nvrtc])
def broken(request, monkeypatch, tmp_path):
    """An environment without one part of the compiler, and an empty cache."""
    monkeypatch.setenv("TE_DIST_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler.importlib, "import_module", request.param)
    for cached in (compiler._binding, compiler.version):
        cached.cache_clear()
    yield request.param
    for cached in (compiler._binding, compiler.version):
        cached.cache_clear()


def test_the_message_names_the_extra(broken):
    what = "CUDA kernels need CuPy" if broken is no_cupy else "finds no NVRTC: Failed to dlopen libnvrtc.so.13; "
    missing = r"^Hadamard<8> for sm_90a is not in "
    with pytest.raises(CompilerError, match=f"{missing}(?!.*searched).*{what}.*{INSTALL}.*TE_DIST_KERNEL_CACHE"):
        runtime.compiled(movement.transform(8), "sm_90a")


@pytest.mark.parametrize(
    ("cupy", "version"), [("cupy-cuda12x", "12.9"), ("cupy-cuda13x", "13.5"), (None, None)], ids=["12", "13", "none"]
)
def test_the_compiler_is_the_one_that_cupy_was_built_for(cupy, version, monkeypatch):
    installed = {"nvidia-cuda-nvrtc": "13.5", "nvidia-cuda-nvrtc-cu12": "12.9", cupy: "14"}

    def distribution(name):
        if name not in installed:
            raise compiler.metadata.PackageNotFoundError(name)
        return SimpleNamespace(version=installed[name], files=())

    monkeypatch.setattr(compiler.metadata, "distribution", distribution)
    monkeypatch.setattr(compiler.importlib, "import_module", no_cupy)
    monkeypatch.setattr(compiler, "_binding", compiler._binding.__wrapped__)
    assert compiler.version.__wrapped__() == version


def test_cpu_tensors_go_on_working(broken):
    out = torch.empty(1, 1)
    ops.tile_amax(torch.tensor([[1.0, -3.0]]), phase=(0, 0), tile=(WHOLE, WHOLE), out=out)
    assert out.item() == 3.0


@pytest.mark.skipif(importlib.util.find_spec("cupy_backends") is None, reason="needs the extra cuda13")
def test_a_kernel_that_does_not_compile_comes_with_the_log():
    spec = Spec("transpose.cuh", "Transpose<no_such_type>", movement.turn(16, (0, 0)).layout)
    with pytest.raises(CompilerError, match=r"(?s)Transpose<no_such_type> does not compile for sm_90a.*undefined"):
        compiler.compile_kernel(spec, "sm_90a")
