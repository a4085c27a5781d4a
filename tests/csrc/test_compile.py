"""Every listed CUDA kernel compiles for every architecture, without a GPU, and keeps its values in registers.

Needs NVRTC and CuPy (extra cuda13); skipped without. Checks every third kernel over bf16; with --all-kernels all.
Compiled ones are kept in build/kernels, by content: only what changed is compiled again.
"""

from __future__ import annotations

import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from te_dist.kernels import compiler, variants
from te_dist.kernels.cache import Compiled, KernelCache
from te_dist.kernels.runtime import ARCHES, entry_of
from te_dist.kernels.spec import Spec

# Bytes a thread may spill to local memory, by a part of a kernel's name, the largest of those that match. NVFP4 has
# more work than bytes, and so has what is computed in front: a spill there costs less than the blocks of threads that
# more registers would displace. On sm_100a FP8 spills a few bytes, more of them in groups of rows, MXFP8 where it
# writes both directions, dequantizers where codes lie along columns, transposes byte by byte. What is computed in
# front of fp16 and fp32, or summed beside, is right but not tuned; nor are gradients of probabilities on sm_100a.
# Compilers differ: the largest of NVRTC 13.0 and 13.5 is allowed.
ALLOWED_SPILLS = {
    "QuantizeNvFp4": 512,
    "QuantizeNvFp4<SwiGluGradient": 592,
    "QuantizeNvFp4<Summed<SwiGluGradient": 896,
    "QuantizeFloat8": 56,
    "GroupedRows": 112,
    "QuantizeMxFp8": 32,
    "QuantizeMxFp8<SwiGlu<": 80,
    "SwiGluGradient": 328,
    "SwiGluGradient<Float": 944,
    "Routing::kDifferentiated": 912,
    "RmsNorm": 40,
    "GemmDecoded": 72,
    "GemmFloat8Block<DepthGroups": 40,  # between tiles
    "128, 1, 3, true>": 96,  # of three consumers that add: where a bias is added too
    "Adam": 512,
    "Summed<Plain<Float16": 320,
    "SwiGlu<Float16": 96,
    "RmsNorm<Float16": 96,
    "Amax<SwiGlu": 40,
    "Dequantize": 16,
    "Transpose": 24,
}

CACHE = KernelCache(Path(__file__).parents[2] / "build" / "kernels")
FILES = sorted({spec.file for spec in variants.variants()})


def allowed_spill(spec: Spec) -> int:
    return max((size for name, size in ALLOWED_SPILLS.items() if name in spec.template), default=0)


@pytest.fixture
def threads(request) -> int:
    """Kernels to be compiled at a time: the machine's cores, shared by the pytest processes."""
    processes = getattr(request.config, "workerinput", {}).get("workercount", 1)
    return max(1, (os.cpu_count() or 1) // processes)


def compiled(spec: Spec, arch: str) -> Compiled:
    entry = entry_of(spec, arch)
    kernel = CACHE.get(entry)
    if kernel is None:
        kernel = compiler.compile_kernel(spec, arch)
        CACHE.put(entry, kernel)
    return kernel


@pytest.mark.skipif(importlib.util.find_spec("cupy_backends") is None, reason="needs the extra cuda13")
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("file", FILES)
def test_kernels_compile_without_spills(file, arch, threads, request):
    is_full = request.config.getoption("--all-kernels")
    listed = variants.variants() if is_full else variants.variants("BFloat16")
    specs = [spec for spec in listed if spec.file == file and spec.runs_on(arch)][:: 1 if is_full else 3]
    with ThreadPoolExecutor(threads) as pool:
        kernels = dict(zip(specs, pool.map(lambda spec: compiled(spec, arch), specs), strict=True))
    assert all(kernel.registers > 0 for kernel in kernels.values())
    spills = {spec.template: kernel.spilled for spec, kernel in kernels.items() if kernel.spilled > allowed_spill(spec)}
    assert not spills, f"for {arch}, bytes spilled: {spills}"


def test_variants_are_listed_once():
    names = [spec.template for spec in variants.variants()]
    assert len(names) == len(set(names))
