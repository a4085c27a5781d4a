"""What a kernel is before it is compiled: a template with its constants, and the layout of its parameters."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, wraps
from typing import Any, ParamSpec

from te_dist.kernels import sources

P = ParamSpec("P")

ENTRY = "te_dist_kernel"  # name of the kernel in every cubin
_TENSOR_MAP, _TENSOR_MAP_ALIGNMENT = "128s", 64
OPTIONS = ("--std=c++17", "--fmad=false", "--ptxas-options=-v")


class Layout:
    """Fields of a kernel's `Params` as they lie in memory, by name and by the character of their type in `struct`.

    Written as text: "x:P extents.rows:q"; T is a tensor map, which comes first. The compiler checks size and offset of
    every field.
    """

    def __init__(self, text: str) -> None:
        fields = [field.split(":") for field in text.split()]
        self.names = tuple(name for name, _ in fields)
        self.addresses = tuple(place for place, (_, code) in enumerate(fields) if code in "PT")
        self._types = tuple(_TENSOR_MAP if code == "T" else code for _, code in fields)
        plain = struct.calcsize("@" + "".join(self._types) + "0q")
        padding = -plain % _TENSOR_MAP_ALIGNMENT if _TENSOR_MAP in self._types else 0
        self._struct = struct.Struct("@" + "".join(self._types) + f"0q{padding}x")
        # By field, where it lies in the parameters.
        self.offsets = tuple(
            struct.calcsize("@" + "".join(self._types[: i + 1])) - struct.calcsize("@" + code)
            for i, code in enumerate(self._types)
        )
        self._maps = [place for place, code in enumerate(self._types) if code == _TENSOR_MAP]
        self.pack = self._pack_maps if self._maps else self._struct.pack

    def _pack_maps(self, *values: Any) -> bytes:
        packed = list(values)
        for place in self._maps:
            packed[place] = values[place].encoded()
        return self._struct.pack(*packed)

    def is_map(self, index: int) -> bool:
        """Whether a field is a tensor map."""
        return self._types[index] == _TENSOR_MAP

    def assertions(self, params: str = "Kernel::Params") -> str:
        """C++ that fails to compile where a struct is laid out in another way."""
        lines = [f'static_assert(sizeof({params}) == {self._struct.size}, "size of Params");']
        for index, name in enumerate(self.names):
            # NOTE: `offsetof`, as NVRTC's front end spells it; it has no <cstddef>.
            place = f"__INTADDR__(&(({params}*)0)->{name})"
            lines.append(f'static_assert({place} == {self.offsets[index]}, "place of {name}");')
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Spec:
    """A kernel to be compiled. Specs are made once each and compared by identity.

    Attributes:
        file: header in csrc/cuda; several are separated by spaces.
        template: class with its constants, as C++.
        layout: of its parameters.
        overlaps: whether it may begin before the kernel in front of it in the stream has ended; it waits inside.
        shared_bytes: dynamic shared memory.
        cluster: blocks of threads of a cluster.
        arch: the only architecture it is written for; None for every one.
        each: of a launch for many matrices, the kernel for one of them.
    """

    file: str
    template: str
    layout: Layout
    overlaps: bool = False
    shared_bytes: int = 0
    cluster: int = 1
    arch: str | None = None
    each: Spec | None = None

    def runs_on(self, arch: str) -> bool:
        """Whether it is written for an architecture."""
        return self.arch in (None, arch)

    @cached_property
    def source(self) -> str:
        """The translation unit."""
        includes = "\n".join(f'#include "cuda/{file}"' for file in self.file.split())
        return f"""{includes}
using namespace te_dist;
using namespace te_dist::cuda;
using Kernel = {self.template};
{self.layout.assertions()}
{self._shape_assertions()}
{self.each.layout.assertions("Kernel::Each::Params") if self.each else ""}
extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
{ENTRY}(const __grid_constant__ Kernel::Params params) {{
  Kernel::run(params);
}}
"""

    def _shape_assertions(self) -> str:
        """C++ that fails to compile where the kernel is made for another launch."""
        if not self.shared_bytes:
            return ""
        return (
            f'static_assert(Kernel::kSharedBytes == {self.shared_bytes}, "shared memory");\n'
            f'static_assert(Kernel::kClusterBlocks == {self.cluster}, "blocks of a cluster");'
        )

    @cached_property
    def key(self) -> str:
        """Digests of everything but compiler and architecture that the cubin depends on."""
        return generation() + hashlib.sha256(self.source.encode()).hexdigest()[:16]


@cache
def generation() -> str:
    """Digest of what the cubins of all kernels depend on; their keys begin with it."""
    return hashlib.sha256("\0".join((sources.fingerprint(), *OPTIONS)).encode()).hexdigest()[:16]


def once(make: Callable[P, Spec]) -> Callable[P, Spec]:
    """For what makes specs: of one template there is one object, whichever arguments were left to their defaults."""
    made: dict[str, Spec] = {}

    @wraps(make)
    def of(*args: P.args, **kwargs: P.kwargs) -> Spec:
        spec = make(*args, **kwargs)
        return made.setdefault(spec.template, spec)

    cached: Any = cache(of)
    return cached


@cache
def overlapped(spec: Spec) -> Spec:
    """The same kernel with `overlaps`."""
    return replace(spec, overlaps=True)
