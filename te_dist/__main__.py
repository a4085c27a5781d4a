"""The command `te-dist`.

te-dist kernels build --arch sm_90a,sm_100a
te-dist kernels list
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from te_dist import env
from te_dist.kernels import CompilerError
from te_dist.kernels.cache import KernelCache
from te_dist.kernels.runtime import ARCHES, cubin_of
from te_dist.kernels.variants import variants

Element = Literal["BFloat16", "Float16", "Float32"]


def build(arch: str = "sm_90a", elements: tuple[Element, ...] = ("BFloat16",)) -> None:
    """Compiles CUDA kernels into the cache, ahead of their first use. Needs no GPU.

    Args:
        arch: architectures, separated by commas: sm_90a, sm_100a.
        elements: types of the matrices to be quantized.
    """
    arches = arch.split(",")
    unknown = [name for name in arches if name not in ARCHES]
    if unknown:
        raise SystemExit(f"--arch: got {', '.join(unknown)}; choose from {', '.join(ARCHES)}")
    work = [(spec, name) for name in arches for spec in variants(*elements)]
    try:
        for spec, name in track(work, "compiling"):
            cubin_of(spec, name)
    except CompilerError as error:
        raise SystemExit(str(error)) from None
    Console().print(f"{len(work)} kernels in {_folder()}")


def list_kernels() -> None:
    """Lists the compiled CUDA kernels in the cache."""
    table = Table("architecture", "kernels", "KiB", "damaged", title=str(_folder()))
    by_arch: dict[str, list[tuple[Path, bool]]] = {}
    for file, is_whole in KernelCache(_folder()).entries():
        by_arch.setdefault(file.parent.name, []).append((file, is_whole))
    for arch, files in by_arch.items():
        size = sum(file.stat().st_size for file, _ in files) // 1024
        table.add_row(arch, str(len(files)), str(size), str(sum(not is_whole for _, is_whole in files)))
    Console().print(table)


def _folder() -> Path:
    return env.KERNEL_CACHE.get()


COMMANDS: dict[str, dict[str, Callable[..., None]]] = {"kernels": {"build": build, "list": list_kernels}}


def main() -> None:
    """Runs the command on the command line."""
    group, *arguments = sys.argv[1:] or [""]
    if group not in COMMANDS:
        raise SystemExit(f"usage: te-dist {{{','.join(COMMANDS)}}} ...")
    tyro.extras.subcommand_cli_from_dict(COMMANDS[group], prog=f"te-dist {group}", args=arguments)


if __name__ == "__main__":
    main()
