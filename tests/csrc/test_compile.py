"""Every listed CUDA kernel compiles for every architecture, without a GPU, and keeps its values in registers.

Needs NVRTC and CuPy (extra cuda13); skipped without. Results are kept by pytest's cache until a source changes.
"""

from __future__ import annotations

import importlib.util

import pytest

from te_dist.kernels import compiler, variants
from te_dist.kernels.runtime import ARCHES
from te_dist.kernels.spec import Spec

# Bytes a thread may spill to local memory, by the start of a kernel's name; none where no name matches. NVFP4 has more
# work than bytes: a spill there costs less than the blocks of threads that more registers would displace. FP8 spills a
# few bytes on sm_100a where it reads one element at a time.
ALLOWED_SPILLS = {"QuantizeNvFp4": 512, "QuantizeFloat8": 48}

SPECS = variants.variants()


def allowed_spill(spec: Spec) -> int:
    return next((size for name, size in ALLOWED_SPILLS.items() if spec.template.startswith(name)), 0)


def resources(spec: Spec, arch: str, cache: pytest.Cache) -> tuple[int, int]:
    """Registers and bytes spilled, compiled anew only where source or compiler changed."""
    key = f"te_dist/kernels/{arch}-{spec.key}-{compiler.version()}"
    known = cache.get(key, None)
    if known is None:
        compiled = compiler.compile_kernel(spec, arch)
        known = (compiled.registers, compiled.spilled)
        cache.set(key, known)
    return tuple(known)


@pytest.mark.skipif(importlib.util.find_spec("cupy_backends") is None, reason="needs the extra cuda13")
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.template)
def test_kernel_compiles_without_spills(spec, arch, request):
    registers, spilled = resources(spec, arch, request.config.cache)
    assert registers > 0
    assert spilled <= allowed_spill(spec), f"{spec.template} for {arch} spills {spilled} bytes"


def test_variants_are_listed_once():
    names = [spec.template for spec in SPECS]
    assert len(names) == len(set(names))
