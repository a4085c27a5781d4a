"""From a spec to a function that runs its kernel on the host."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import re
import struct
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from te_dist.kernels import sources
from te_dist.kernels.arguments import MatrixMap
from te_dist.kernels.spec import Spec
from tests.simulation.ptx import without_assembly

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "build" / "simulation"
# Threads that take turns jump from stack to stack, which fortified functions take for an error.
OPTIONS = ["-std=c++20", "-w", "-Wno-psabi", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", f"-I{HERE}"]
ENTRY = """
extern "C" void run(const void* parameters, unsigned grid, unsigned height, unsigned cluster) {
  const auto kernel = [](const void* its) { te_dist_kernel(*static_cast<const Kernel::Params*>(its)); };
  sim::run({kernel, parameters, {grid, height, 1}, cluster, unsigned(Kernel::kThreads)});
}
"""
_ELEMENT_BYTES = {0: 1, 6: 2, 7: 4, 9: 2}  # by the type of a tensor map


class Map:
    """A tensor map as device.h has it."""

    def __init__(self, map: MatrixMap) -> None:
        self._map = map

    def encoded(self) -> bytes:
        kind, *rest = self._map.place
        return struct.pack("@8q", self._map.address, _ELEMENT_BYTES[kind], *rest)


@cache
def compiled(spec: Spec) -> ctypes.CDLL:
    """The kernel with its launcher; kept on disk by what it is made of."""
    includes, found, body = spec.source.partition("using namespace")
    plain = "\n".join(line for line in (found + body).splitlines() if "__INTADDR__" not in line)
    whole = "\n".join(('#include "device.h"', expanded(includes), plain, ENTRY))
    return ctypes.CDLL(str(library(whole, "-O1", simulator().name, "-Wl,-rpath,$ORIGIN")))


@cache
def expanded(includes: str) -> str:
    """Headers of csrc/cuda as C++ for the host."""
    command = ["g++", "-E", "-P", "-x", "c++", "-std=c++20", "-imacros", str(HERE / "device.h")]
    command += [f"-I{sources.folder()}", "-"]
    text = subprocess.run(command, input=includes, capture_output=True, text=True, check=True).stdout
    text = re.sub(r"extern SIM_SHARED\s+(\w+) memory\[\];", r"auto* memory = (\1*)sim::dynamic_shared();", text)
    return without_assembly(re.sub(r"\bSIM_SHARED\s+(alignas\(\w+\))?", r"\1 static ", text))


@cache
def simulator() -> Path:
    """What kernels call, compiled once for all: it takes as long as ten of them."""
    return library('#include "simulator.cpp"\n#include "numbers.cpp"', "-O2", "-fno-semantic-interposition")


def library(source: str, *options: str) -> Path:
    """Of C++, compiled unless it lies there already."""
    key = hashlib.sha256("\0".join((source, *OPTIONS, *options)).encode() + common()).hexdigest()[:24]
    target = FOLDER / f"{key}.so"
    if not target.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with (FOLDER / f"{key}.cpp").open("a") as text:
            fcntl.flock(text, fcntl.LOCK_EX)  # of processes that need the same one, one makes it
            if not target.exists():
                text.truncate(0)
                text.write(source)
                text.flush()
                made = target.with_suffix(".made")
                command = ["g++", *OPTIONS, text.name, *options, "-o", made.name]
                subprocess.run(command, check=True, cwd=FOLDER)
                made.rename(target)
    return target


@cache
def common() -> bytes:
    """What every library depends on."""
    compiler = subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout
    return compiler + b"".join(path.read_bytes() for path in sorted(HERE.glob("*.[ch]*")))


def launch(spec: Spec, on: Tensor, grid: tuple[int, int], values: tuple[Any, ...]) -> None:
    """In the place of te_dist.kernels.runtime.launch, on CPU tensors."""
    packed = spec.layout.pack(*(Map(value) if isinstance(value, MatrixMap) else value for value in values))
    # Parameters lie at a multiple of 64 bytes.
    buffer = ctypes.create_string_buffer(len(packed) + 64)
    start = -(-ctypes.addressof(buffer) // 64) * 64
    ctypes.memmove(start, packed, len(packed))
    compiled(spec).run(ctypes.c_void_p(start), *grid, spec.cluster)
