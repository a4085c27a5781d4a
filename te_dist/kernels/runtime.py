"""From a spec to a launched kernel: looked up in memory, then on disk, then compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from te_dist import _C, env
from te_dist._torch_private import current_cuda_stream
from te_dist.kernels import compiler
from te_dist.kernels.cache import Entry, KernelCache
from te_dist.kernels.spec import ENTRY, Spec

MEASURED = {(9, 0): "sm_90a"}
UNMEASURED = {(10, 0): "sm_100a"}
ARCHES = (*MEASURED.values(), *UNMEASURED.values())

_loaded: dict[tuple[Spec, int], _C.cuda.Kernel] = {}
_cubins: dict[tuple[str, str], bytes] = {}  # by (arch, key)


@cache
def arch_of(device: int) -> str:
    """The architecture that kernels for a device are compiled for."""
    capability = tuple(_C.cuda.compute_capability(device))
    if capability in MEASURED:
        return MEASURED[capability]
    if capability not in UNMEASURED:
        raise RuntimeError(
            f"CUDA device {device} has compute capability {capability[0]}.{capability[1]}; te_dist has kernels for "
            f"{', '.join(ARCHES)}; keep tensors on the CPU"
        )
    if not env.UNMEASURED_KERNELS.get():
        raise RuntimeError(
            f"te_dist's kernels for {UNMEASURED[capability]} have never been run; "
            f"set {env.UNMEASURED_KERNELS.name}=1 to run them all the same"
        )
    return UNMEASURED[capability]


def cubin_of(spec: Spec, arch: str, *, build: Callable[[Spec, str], compiler.Compiled] | None = None) -> bytes:
    """The compiled kernel, from the cache where it has it. `build` compiles in place of NVRTC."""
    place = (arch, spec.key)
    if place not in _cubins:
        stored = KernelCache(env.KERNEL_CACHE.get())
        entry = Entry(arch, spec.key, compiler.version())
        cubin = stored.get(entry)
        if cubin is None:
            cubin = (build or compiler.compile_kernel)(spec, arch).cubin
            stored.put(Entry(arch, spec.key, entry.version or "unknown"), cubin)
        _cubins[place] = cubin
    return _cubins[place]


def prepare(specs: Iterable[Spec], arch: str, *, threads: int = 4) -> None:
    """Compiles what is missing, several at a time."""
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda spec: cubin_of(spec, arch), specs):
            pass


def launch(spec: Spec, on: Tensor, grid: tuple[int, int], values: tuple[int | float, ...]) -> None:
    """Launches on the current stream of the device of `on`. `values`: one for each field of the spec's layout.

    Not a host synchronization, not an allocation on the device; outputs must be there.
    """
    device = on.get_device()
    kernel = _loaded.get((spec, device)) or _load(spec, device)
    try:
        kernel.launch(device, current_cuda_stream(device), (*grid, 1), spec.layout.pack(*values))
    except RuntimeError as error:
        fields = ", ".join(f"{name}={value}" for name, value in zip(spec.layout.names, values, strict=True))
        raise RuntimeError(f"{error}; arguments {fields}") from None


def fill_zero(tensor: Tensor) -> None:
    """Zeros into a contiguous tensor of 4-byte elements, in the order of its device's current stream."""
    device = tensor.get_device()
    _C.cuda.fill_words(device, current_cuda_stream(device), tensor.data_ptr(), 0, tensor.numel())


def _load(spec: Spec, device: int) -> _C.cuda.Kernel:
    if torch.cuda.is_current_stream_capturing() and (arch_of(device), spec.key) not in _cubins:
        raise RuntimeError(f"{spec.template} would be compiled under CUDA graph capture; run it once before")
    kernel = _C.cuda.Kernel(cubin_of(spec, arch_of(device)), ENTRY, spec.template)
    return _loaded.setdefault((spec, device), kernel)
