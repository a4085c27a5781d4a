"""Listed CUDA kernels compile for every architecture, without a GPU, and keep their values in registers.

Needs NVRTC and CuPy (extra cuda13); skipped without. Of what is listed over bf16, and of every tiling that products of
FP8 blocks choose, a forty-eighth is compiled, another one with every commit: its number stands in the names of the
tests. With --exhaustive all. Compiled ones are kept in build/kernels, by content: only what changed is compiled
again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from te_dist.kernels import compiler, gemm, sources, variants
from te_dist.kernels.cache import Compiled, KernelCache
from te_dist.kernels.runtime import ARCHES, entry_of
from te_dist.kernels.spec import Spec

# Bytes a thread may spill to local memory, by architecture and a pattern of a kernel's name; the last that matches
# counts, and where none does it is nothing. They are what NVRTC 13.5 spills, and a little. NVFP4 has more work than
# bytes, and so has what is computed in front: a spill there costs less than the blocks of threads that more registers
# would displace. What is summed beside in fp16 is right but not tuned, nor is sm_100a.
OF_FULL_PRECISION = {  # looked at with --exhaustive only
    r"QuantizeNvFp4<Plain<Float32": 512,
    r"(Summed<\w+|SwiGlu\w*|RmsNorm)<Float32": 944,
    r"Adam<(Float16|Float32)": 512,
}
ALLOWED_SPILLS = {
    "sm_90a": {
        r"GemmDecoded": 32,
        r"GemmStaged<OneProduct": 80,
        r"GroupedGemm<GroupProducts.*Float32, \w+, 128, \d, \d, true": 8,
        r"GemmFloat8Block<DepthGroups": 32,
        r"GemmFloat8Block<OneProduct.*Float32, \w+, 2, 1, 128, 1, 4, true": 80,
        r"GemmFloat8Block<.*Float32, \w+, 3, 1, 128, 1, 3, true": 248,
        r"Amax<SwiGlu": 24,
        r"TileAmax<Adam": 280,
        r"Evaluate<SwiGluGradient": 32,
        r"QuantizeFloat8": 8,
        r"QuantizeFloat8<Adam": 120,
        r"QuantizeFloat8<(RmsNorm|(Summed<)?SwiGlu)": 48,
        r"QuantizeFloat8<.*kDifferentiated>": 136,
        r"QuantizeMxFp8": 16,
        r"QuantizeMxFp8<(RmsNorm|(Summed<)?SwiGlu)": 112,
        r"QuantizeMxFp8<Summed<\w+<Float16": 304,
        r"QuantizeNvFp4": 32,
        r"QuantizeNvFp4<Plain<": 96,
        r"QuantizeNvFp4<Summed<Plain<": 48,
        r"QuantizeNvFp4<SwiGluGradient.*kDifferentiated": 64,
        **OF_FULL_PRECISION,
    },
    "sm_100a": {
        r"Dequantize": 16,
        r"Amax<SwiGlu<": 40,
        r"Amax<SwiGluGradient": 336,
        r"TileAmax<Adam": 168,
        r"Evaluate<SwiGluGradient": 24,
        r"QuantizeFloat8": 72,
        r"QuantizeFloat8<Summed<Plain<Float16": 304,
        r"QuantizeFloat8<(Summed<)?SwiGluGradient": 368,
        r"QuantizeFloat8<.*kDifferentiated": 800,
        r"QuantizeMxFp8": 72,
        r"QuantizeMxFp8<(RmsNorm|(Summed<)?SwiGlu)": 112,
        r"QuantizeMxFp8<.*kDifferentiated": 224,
        r"QuantizeMxFp8<Summed<\w+<Float16": 328,
        r"QuantizeNvFp4": 32,
        r"QuantizeNvFp4<Plain<": 152,
        r"QuantizeNvFp4<Summed<.*kStochastic": 144,
        r"QuantizeNvFp4<(Summed<)?SwiGluGradient": 592,
        r"QuantizeNvFp4<.*kDifferentiated": 928,
        **OF_FULL_PRECISION,
        r"TensorAmax<SwiGluGradient<Float32": 1272,
    },
}

ROOT = Path(__file__).parents[2]
CACHE = KernelCache(ROOT / "build" / "kernels")
FILES = sorted({spec.file for spec in variants.variants()})
PARTS = 48


def turn() -> int:
    """Which part is compiled: another one with every commit; without git, with every change of the sources."""
    text = sources.fingerprint()
    with suppress(OSError, subprocess.CalledProcessError):
        head = ["git", "rev-parse", "HEAD"]
        text = subprocess.run(head, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % PARTS


TURN = turn()


@cache
def dense() -> tuple[Spec, ...]:
    """Products of FP8 blocks to bf16 and fp32: every tiling that is chosen for some representative size."""
    sizes = tuple(product((16, 128, 512, 2048, 8192, 65536), (1024, 2048, 4096, 7168, 14336, 28672), (8, 32, 112)))
    found = {
        gemm.float8_block(codes, "BFloat16" if kind.out_bytes == 2 else "Float32", kind.square, tiling, adds=kind.adds)
        for kind in gemm.RATES
        for tiling in {gemm.tiling(*size, kind) for size in sizes}
        for codes in (("E4M3", "E4M3"), ("E5M2", "E4M3"))
    }
    return tuple(sorted(found, key=lambda spec: spec.template))


def chosen(file: str, arch: str, turn: int | None) -> list[Spec]:
    """What of a file is compiled for an architecture at a turn; all of it at none."""
    listed = variants.variants() if turn is None else dict.fromkeys([*variants.variants("BFloat16"), *dense()])
    specs = [spec for spec in listed if spec.runs_on(arch)]
    return [spec for i, spec in enumerate(specs) if spec.file == file and turn in (None, i % PARTS)]


def allowed_spill(spec: Spec, arch: str) -> int:
    return ([size for name, size in ALLOWED_SPILLS[arch].items() if re.search(name, spec.template)] or [0])[-1]


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
@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file}, part {TURN}")
def test_kernels_compile_without_spills_and_serialized_products(file, arch, threads, request):
    specs = chosen(file, arch, None if request.config.getoption("--exhaustive") else TURN)
    if not specs:
        pytest.skip(f"none of {file} for {arch} is in this part")
    with ThreadPoolExecutor(threads) as pool:
        made = dict(zip(specs, pool.map(lambda spec: compiled(spec, arch), specs), strict=True))
    assert all(kernel.registers > 0 for kernel in made.values())
    spills = {s.template: kernel.spilled for s, kernel in made.items() if kernel.spilled > allowed_spill(s, arch)}
    assert not spills, f"for {arch}, bytes spilled: {spills}"
    serialized = [spec.template for spec, kernel in made.items() if kernel.serialized]
    assert not serialized, f"for {arch}, each product of the tensor cores waits for the one before: {serialized}"


def test_variants_are_listed_once():
    names = [spec.template for spec in variants.variants()]
    assert len(names) == len(set(names))


def test_all_that_is_listed_is_compiled_sooner_or_later():
    found = {spec.template for file in FILES for turn in range(PARTS) for spec in chosen(file, "sm_90a", turn)}
    assert {spec.template for spec in (*variants.variants("BFloat16"), *dense())} == found
