"""NVRTC, through CuPy's binding. Nothing here is imported before a kernel has to be compiled."""

from __future__ import annotations

import ctypes
import importlib
import re
from contextlib import suppress
from functools import cache
from importlib import metadata
from types import ModuleType

from te_dist.kernels import sources
from te_dist.kernels.cache import Compiled
from te_dist.kernels.spec import ENTRY, OPTIONS, Spec

_BINDING = "cupy_backends.cuda.libs.nvrtc"
_WHEELS = {"cupy-cuda13x": "nvidia-cuda-nvrtc", "cupy-cuda12x": "nvidia-cuda-nvrtc-cu12"}  # NVRTC by who loads it
_INSTALL = "install te_dist with its extra cuda13 (or cuda12), which brings CuPy and NVRTC and needs no CUDA toolkit"
_RESOURCES = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
_REGISTERS = re.compile(r"Used (\d+) registers")
_SERIALIZED = "wgmma.mma_async instructions are serialized"


class CompilerError(RuntimeError):
    """A kernel could not be compiled: no compiler, or a compiler that refuses."""


class NoCompilerError(CompilerError):
    """There is no compiler."""


@cache
def version() -> str | None:
    """Of the NVRTC that compiles, found without loading it where it came as a wheel; None where nothing does."""
    wheel = _wheel()
    if wheel is not None:
        return wheel.version
    try:
        return ".".join(map(str, _binding().getVersion()))
    except CompilerError:
        return None


def compile_kernel(spec: Spec, arch: str) -> Compiled:
    """Compiles for "sm_90a" or the like; needs no GPU. Raises CompilerError."""
    nvrtc = _binding()
    options = (f"--gpu-architecture={arch}", f"--include-path={sources.folder()}", *OPTIONS)
    program = nvrtc.createProgram(spec.source, f"{ENTRY}.cu", [], [])
    try:
        nvrtc.compileProgram(program, options)
        log = nvrtc.getProgramLog(program)
        # NOTE: CuPy's getCUBIN leaves out the last byte, which is always zero; without it the file is damaged.
        cubin = nvrtc.getCUBIN(program) + b"\0"
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise CompilerError(f"{spec.template} does not compile for {arch} ({error}):\n{log}") from None
    finally:
        nvrtc.destroyProgram(program)
    return Compiled(cubin, *_resources(log))


def _resources(log: str) -> tuple[int, int, bool]:
    """Registers, bytes spilled, and whether products are serialized."""
    registers, spills = _REGISTERS.search(log), _RESOURCES.search(log)
    spilled = max(int(spills["stores"]), int(spills["loads"])) if spills else 0
    return int(registers[1]) if registers else 0, spilled, _SERIALIZED in log


@cache
def _binding() -> ModuleType:
    try:
        binding = importlib.import_module(_BINDING)
    except ImportError as error:
        raise NoCompilerError(f"CUDA kernels need CuPy to be compiled: {error}; {_INSTALL}") from None
    try:
        _load_wheel()
        binding.getVersion()
    except Exception as error:  # CuPy raises its own types, and plain RuntimeError, where libnvrtc is missing
        reason = str(error).partition("\n")[0]
        raise NoCompilerError(f"CuPy is installed but finds no NVRTC: {reason}; {_INSTALL}") from None
    return binding


def _wheel() -> metadata.Distribution | None:
    """The NVRTC that came as a wheel for the CuPy that is installed; there may be others beside it, torch's for one."""
    for cupy, nvrtc in _WHEELS.items():
        with suppress(metadata.PackageNotFoundError):
            metadata.distribution(cupy)
            return metadata.distribution(nvrtc)
    return None


def _load_wheel() -> None:
    """Loads the NVRTC that came as a wheel, wherever on the path it lies; CuPy looks in the folders of its own only."""
    wheel = _wheel()
    if wheel is None:
        return
    for library in ("libnvrtc-builtins.so.*", "libnvrtc.so.*"):  # the latter asks for the former, by name alone
        for file in wheel.files or ():
            if file.match(library):
                ctypes.CDLL(str(wheel.locate_file(file)))
