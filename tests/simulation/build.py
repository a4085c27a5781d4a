"""From a spec to a function that runs its kernel on the host."""

from __future__ import annotations

import ctypes
import hashlib
import os
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
OPTIONS = ["-std=c++20", "-O1", "-w", "-fPIC", "-U_FORTIFY_SOURCE"]
MACROS = {
    "__CUDACC_RTC__": "1",
    "__device__": "",
    "__forceinline__": "inline",
    "__global__": "",
    "__grid_constant__": "",
    "__launch_bounds__(...)": "",
    "__constant__": "",
    "__shared__": "SIM_SHARED",
    "__align__(bytes)": "",
}
ENTRY = """
extern "C" void run(const void* parameters, unsigned grid, unsigned height, unsigned cluster) {
  const unsigned each = unsigned(Kernel::kThreads);
  sim::Turns turns(cluster * each);
  sim::turns = &turns;
  gridDim = {grid, height, 1}, blockDim = {each, 1, 1};
  for (unsigned block = 0; block < grid * height; block += cluster) {
    sim::Cluster its(cluster, each, {block % grid, block / grid, 0});
    turns.run(its.threads, [=] { te_dist_kernel(*static_cast<const Kernel::Params*>(parameters)); });
  }
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
    plain = "\n".join(line for line in spec.source.splitlines() if "__INTADDR__" not in line)
    defined = [f"-D{name}={value}" for name, value in MACROS.items()]
    command = ["g++", "-E", "-P", "-x", "c++", "-std=c++20", *defined, f"-I{sources.folder()}", "-"]
    text = subprocess.run(command, input=plain, capture_output=True, text=True, check=True).stdout
    text = re.sub(r"extern SIM_SHARED\s+(\w+) memory\[\];", r"auto* memory = (\1*)sim::dynamic_shared();", text)
    text = without_assembly(re.sub(r"\bSIM_SHARED\s+(alignas\(\w+\))?", r"\1 static ", text))
    names = "#define int64_t te_int64_t\n#define uint64_t te_uint64_t\n"
    whole = f'#include "device.h"\n{names}{text}{ENTRY}'
    key = hashlib.sha256(whole.encode() + simulator()).hexdigest()[:24]
    library = FOLDER / f"{key}.so"
    if not library.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        # Several processes may make the same one.
        source, made = (FOLDER / f"{key}.{os.getpid()}.{kind}" for kind in ("cpp", "made"))
        source.write_text(whole)
        found = [f"-I{headers()}", f"-I{HERE}"]
        subprocess.run(["g++", *OPTIONS, "-shared", *found, str(source), "-o", str(made)], check=True)
        made.rename(library)
    return ctypes.CDLL(str(library))


@cache
def simulator() -> bytes:
    """What every simulated kernel includes."""
    return b"".join((HERE / name).read_bytes() for name in ("device.h", "threads.h"))


@cache
def headers() -> Path:
    """Where device.h lies compiled: it takes as long as most kernels."""
    compiler = subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(compiler + simulator()).hexdigest()[:24]
    folder = FOLDER / f"headers_{key}"
    if not (folder / "device.h.gch").exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f"{os.getpid()}.made"
        subprocess.run(["g++", *OPTIONS, "-x", "c++-header", str(HERE / "device.h"), "-o", str(made)], check=True)
        made.rename(folder / "device.h.gch")
    return folder


def launch(spec: Spec, on: Tensor, grid: tuple[int, int], values: tuple[Any, ...]) -> None:
    """In the place of te_dist.kernels.runtime.launch, on CPU tensors."""
    packed = spec.layout.pack(*(Map(value) if isinstance(value, MatrixMap) else value for value in values))
    # Parameters lie at a multiple of 64 bytes.
    buffer = ctypes.create_string_buffer(len(packed) + 64)
    start = -(-ctypes.addressof(buffer) // 64) * 64
    ctypes.memmove(start, packed, len(packed))
    compiled(spec).run(ctypes.c_void_p(start), *grid, spec.cluster)
