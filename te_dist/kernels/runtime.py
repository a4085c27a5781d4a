"""From a spec to a launched kernel: looked up in memory, then on disk, then compiled.

[Note: Kernels ahead of time]
Which kernels a model launches is found by a rehearsal: its modules run once on meta tensors inside of `recording()`,
where an op computes nothing and notes the specs that it would launch. `prepare` compiles and loads them. Both happen
when a model is wrapped, so that no rank waits in a collective for another's compiler, and no graph capture comes upon
a kernel that has still to be loaded.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_dist import _C, env
from te_dist._torch_private import current_cuda_stream
from te_dist.kernels import compiler
from te_dist.kernels.cache import Compiled, Entry, KernelCache
from te_dist.kernels.spec import ENTRY, Layout, Spec

MEASURED = {(9, 0): "sm_90a"}
UNMEASURED = {(10, 0): "sm_100a"}
ARCHES = (*MEASURED.values(), *UNMEASURED.values())
ALIGNMENT = 128  # bytes: addresses modulo this decide what is launched; a launch is repeated where they are the same

_loaded: dict[tuple[Spec, int], _C.cuda.Kernel] = {}
_recorded: ContextVar[list[Spec] | None] = ContextVar("te_dist_recorded_specs", default=None)
_listener: ContextVar[Callable[[Launch], None] | None] = ContextVar("te_dist_listener", default=None)


class Launch(NamedTuple):
    """A kernel, or a product of cuBLASLt, with all that it is launched with.

    Attributes:
        grid: of blocks of threads; a product has its own.
        values: one for each field of `layout`.
    """

    kernel: _C.cuda.Launchable
    device: int
    grid: tuple[int, int, int]
    layout: Layout
    values: Sequence[Any]

    def start(self, stream: int) -> None:
        """Launches."""
        try:
            self.kernel.launch(self.device, stream, self.grid, self.layout.pack(*self.values))
        except RuntimeError as error:
            raise self.failed(error, self.values) from None

    def failed(self, error: RuntimeError, values: Sequence[Any]) -> RuntimeError:
        """The error, with the values that it was launched with."""
        fields = ", ".join(f"{name}={value}" for name, value in zip(self.layout.names, values, strict=True))
        return RuntimeError(f"{error}; arguments {fields}")


@cache
def arch_of(device: int) -> str:
    """The architecture that kernels for a device are compiled for."""
    major, minor = _C.cuda.compute_capability(device)
    capability = major, minor
    if capability in MEASURED:
        return MEASURED[capability]
    if capability not in UNMEASURED:
        raise RuntimeError(
            f"CUDA device {device} has compute capability {major}.{minor}; te_dist has kernels for "
            f"{', '.join(ARCHES)}; keep tensors on the CPU"
        )
    if not env.UNMEASURED_KERNELS.get():
        raise RuntimeError(
            f"te_dist's kernels for {UNMEASURED[capability]} have never been run; "
            f"set {env.UNMEASURED_KERNELS.name}=1 to run them all the same"
        )
    return UNMEASURED[capability]


def target_of(device: torch.device) -> str:
    """By what functions for tensors on `device` are chosen: the architecture of a GPU, else the type of the device.

    Tensors without values are those of the current GPU, for which kernels are rehearsed; where there is none, of the
    first architecture that te_dist has run on.
    """
    if device.type == "meta" and not torch.cuda.is_available():
        return next(iter(MEASURED.values()))
    if device.type not in ("cuda", "meta"):
        return device.type
    return arch_of(torch.cuda.current_device() if device.index is None else device.index)


@cache
def multiprocessors(device: int) -> int:
    """Of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def entry_of(spec: Spec, arch: str) -> Entry:
    """Where a cache has the kernel, as the compiler that is installed makes it."""
    return Entry(arch, spec.key, compiler.version())


def compiled(spec: Spec, arch: str) -> Compiled:
    """The kernel, from the user's cache where it has it. Raises CompilerError."""
    cache, entry = KernelCache(env.KERNEL_CACHE.get()), entry_of(spec, arch)
    found = cache.get(entry)
    if found is not None:
        return found
    try:
        made = compiler.compile_kernel(spec, arch)
    except compiler.NoCompilerError as error:
        raise compiler.NoCompilerError(
            f"{spec.template} for {arch} is not in {cache.folder}, and {error}; or name a cache that has it in "
            f"{env.KERNEL_CACHE.name} (`te-dist kernels list` shows what one has)"
        ) from None
    try:
        cache.put(entry, made)
    except OSError as error:
        warnings.warn(
            f"compiled CUDA kernels are not kept in {cache.folder}: {error.strerror}; every process compiles its own "
            f"until {env.KERNEL_CACHE.name} names a folder that can be written",
            stacklevel=2,
        )
    return made


@contextmanager
def recording() -> Iterator[list[Spec]]:
    """A block in which ops on meta tensors note, in the list, the kernels that they would launch on CUDA tensors."""
    specs: list[Spec] = []
    token = _recorded.set(specs)
    try:
        yield specs
    finally:
        _recorded.reset(token)


def is_recording() -> bool:
    """Whether this runs inside of `recording()`."""
    return _recorded.get() is not None


def prepare(specs: Iterable[Spec], device: int) -> None:
    """Compiles and loads on a device what is not there yet, several at a time. Raises CompilerError.

    Processes of one host, each with a device of its own, begin at different places of the list; where they share a
    cache, each finds there what others have compiled by then.
    """
    missing = [spec for spec in dict.fromkeys(specs) if (spec, device) not in _loaded]
    num_devices = torch.cuda.device_count()
    first = device * len(missing) // num_devices
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // num_devices)) as pool:
        for kernel in pool.map(lambda spec: _load(spec, device), missing[first:] + missing[:first]):
            kernel.load(device)


def launch(spec: Spec, on: Tensor, grid: tuple[int, int], values: Sequence[Any]) -> None:
    """Launches on the current stream of the device of `on`. `values`: one for each field of the spec's layout.

    Not a host synchronization, not an allocation on the device; outputs must be there.
    """
    device = on.get_device()
    kernel = _loaded.get((spec, device))
    if kernel is None:
        if on.is_meta:
            return record(spec)
        kernel = _load(spec, device)
    issue(Launch(kernel, device, (*grid, 1), spec.layout, values))


def issue(launch: Launch) -> None:
    """Launches on the current stream of the device, and tells who listens."""
    launch.start(current_cuda_stream(launch.device))
    listener = _listener.get()
    if listener is not None:
        listener(launch)


@contextmanager
def listening(listener: Callable[[Launch], None]) -> Iterator[None]:
    """A block in which `listener` is told of every launch of this thread."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def record(spec: Spec) -> None:
    """Notes a kernel inside of `recording()`."""
    specs = _recorded.get()
    assert specs is not None  # meta tensors come here from a rehearsal only
    specs.append(spec)


def _load(spec: Spec, device: int) -> _C.cuda.Kernel:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{spec.template} would be loaded under CUDA graph capture; run what is captured once before, or prepare "
            "the model (te_dist.prepare)"
        )
    if not spec.runs_on(arch_of(device)):
        raise NotImplementedError(
            f"{spec.template} is written for {spec.arch}, the tensors are on {arch_of(device)}; multiply them on the "
            "former, or in high precision"
        )
    shape = {"cluster": spec.cluster, "shared_bytes": spec.shared_bytes, "overlaps": spec.overlaps}
    kernel = _C.cuda.Kernel(compiled(spec, arch_of(device)).cubin, ENTRY, spec.template, **shape)
    return _loaded.setdefault((spec, device), kernel)
