"""The command `te-dist`.

te-dist kernels build --arch sm_90a,sm_100a
te-dist kernels list
te-dist plan launch/configs/llama_8gpu.toml --world-size 8
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from te_dist import env
from te_dist.kernels import CompilerError, compiler
from te_dist.kernels.cache import Compiled, KernelCache
from te_dist.kernels.runtime import ARCHES, entry_of
from te_dist.kernels.spec import Spec, generation
from te_dist.kernels.variants import variants
from te_dist.launch.errors import JobError
from te_dist.launch.plan import plan_job
from te_dist.launch.plan_tables import as_json, show

_WIDE = 200  # columns of tables that go into a file
_FAILURE, _USAGE, _STOPPED = 1, 2, 130  # exit statuses
_HELP = """\
te-dist kernels build    compiles CUDA kernels into the cache, ahead of their first use; needs no GPU
te-dist kernels list     says what the cache holds
te-dist plan FILE.toml   says what a job stores and sends, beside bf16; starts nothing
A job itself is started by torchrun: torchrun --standalone --nproc-per-node 8 -m te_dist.launch.train FILE.toml
With --help each says more."""
Element = Literal["BFloat16", "Float16", "Float32"]


def build(arch: str = "sm_90a", elements: tuple[Element, ...] = ("BFloat16",)) -> None:
    """Compiles CUDA kernels into the cache, ahead of their first use. Needs no GPU.

    Args:
        arch: architectures, separated by commas: sm_90a, sm_100a.
        elements: types of the matrices to be quantized.
    """
    arches = tuple(dict.fromkeys(arch.split(",")))
    unknown = [name for name in arches if name not in ARCHES]
    if unknown:
        _end(f"--arch: got {', '.join(map(repr, unknown))}; choose from {', '.join(ARCHES)}", _USAGE)
    cache = _cache()
    work = [(spec, name) for name in arches for spec in variants(*elements) if spec.runs_on(name)]
    missing = [(spec, name) for spec, name in work if cache.get(entry_of(spec, name)) is None]
    console = Console(stderr=True, soft_wrap=True)
    if missing and not console.is_terminal:  # which would show how far it is
        console.print(f"compiling {len(missing)} of {len(work)} kernels for {', '.join(arches)}")
    try:
        made = _compile(missing, cache)
    except CompilerError as error:
        _end(str(error), _FAILURE)
    except KeyboardInterrupt:
        _end(f"stopped; what was compiled until now stays in {cache.folder}", _STOPPED)
    except OSError as error:
        _end(f"{error}; name a folder that can be written, with enough space, in {env.KERNEL_CACHE.name}", _FAILURE)
    size = sum(len(kernel.cubin) for kernel in made) / 2**20
    Console(soft_wrap=True).print(
        f"{len(work)} kernels for {', '.join(arches)} by NVRTC {compiler.version() or 'of any version'} in "
        f"{cache.folder}: {len(made)} compiled now, {size:.1f} MiB"
    )


def _compile(work: list[tuple[Spec, str]], cache: KernelCache) -> list[Compiled]:
    """Compiles for the named architectures, one kernel for each core at a time, into the cache."""

    def one(place: tuple[Spec, str]) -> Compiled:
        made = compiler.compile_kernel(*place)
        cache.put(entry_of(*place), made)
        return made

    pool, console = ThreadPoolExecutor(os.cpu_count()), Console(stderr=True)
    try:
        kernels = pool.map(one, work)
        if not console.is_terminal:
            return list(kernels)
        return list(track(kernels, "compiling", total=len(work), console=console, transient=True))
    finally:
        pool.shutdown(cancel_futures=True)


def list_kernels() -> None:
    """Lists the compiled CUDA kernels in the cache."""
    cache = _cache()
    if cache.folder.exists() and not cache.folder.is_dir():
        _end(f"{env.KERNEL_CACHE.name}: got {cache.folder}, a file; wanted a folder; name another one", _USAGE)
    table = Table("architecture", "kernels", "stale", "damaged", "KiB", title=str(cache.folder))
    by_arch: dict[str, list[tuple[Path, Compiled | None]]] = {}
    for file, kernel in cache.entries():
        by_arch.setdefault(file.parent.name, []).append((file, kernel))
    for arch, files in by_arch.items():
        size = sum(_size(file) for file, _ in files) // 1024
        damaged = sum(kernel is None for _, kernel in files)
        stale = sum(kernel is not None and _is_stale(file) for file, kernel in files)
        table.add_row(arch, *map(str, (len(files) - stale - damaged, stale, damaged, size)))
    Console().print(table)
    version = compiler.version()
    wanted = f"NVRTC {version}" if version else "any NVRTC, as none is installed"
    Console(soft_wrap=True).print(f"used: kernels of the installed sources by {wanted}; others are stale")


def _size(file: Path) -> int:
    """Bytes of an entry; of a broken link, or of one that is removed meanwhile, none."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _is_stale(file: Path) -> bool:
    """Whether an entry is of other sources or of another compiler than those that are installed."""
    key, _, version = file.stem.partition("-")
    return not key.startswith(generation()) or compiler.version() not in (None, version)


def _cache() -> KernelCache:
    try:
        return KernelCache(env.KERNEL_CACHE.get())
    except ValueError as error:
        _end(str(error), _USAGE)


@dataclass(frozen=True)
class PlanOptions:
    """What `te-dist plan` takes beside the configuration and the job's overrides of it (--recipe mxfp8 --mesh.tp 2)."""

    world_size: int = 0
    """Ranks; 0 for as many as the configuration's mesh has."""
    rank: int = 0
    """Whose parameters are listed one by one; the sums are of every rank."""
    json: bool = False
    """Print everything, of every parameter and rank, in bytes."""


def plan(arguments: Sequence[str]) -> None:
    """Shows what a configured job stores and sends, by layer and rank, beside bf16. Starts nothing.

    Args:
        arguments: a TOML file, options of `PlanOptions`, and overrides as `te_dist.launch.train` takes them.
    """
    usage = "te-dist plan CONFIG.toml"
    options, rest = tyro.cli(PlanOptions, prog=usage, args=list(arguments), return_unknown_args=True)
    try:
        found = plan_job(rest, options.world_size, watch=_watched)
        if not 0 <= options.rank < len(found.ranks):
            _end(f"--rank: got {options.rank}, wanted one of {len(found.ranks)} ranks; change it", _USAGE)
        if options.json:
            print(as_json(found))
        else:
            console = Console()
            show(found, options.rank, console if console.is_terminal else Console(width=_WIDE))
    except JobError as error:
        _end(str(error), _FAILURE)


def _watched(ranks: Sequence[int], recipe: str) -> Iterable[int]:
    """Shows on a terminal how many ranks are planned."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return ranks
    return track(ranks, f"planning ranks in {recipe}", console=console, transient=True)


COMMANDS: dict[str, dict[str, Callable[..., None]]] = {"kernels": {"build": build, "list": list_kernels}}


def main() -> None:
    """Runs the command on the command line."""
    try:
        _run(*sys.argv[1:] or [""])
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough; what is left must not be written when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(_FAILURE) from None


def _run(group: str, *arguments: str) -> None:
    if group in ("-h", "--help"):
        print(_HELP)
    elif group == "plan":
        plan(arguments)
    elif group not in COMMANDS:
        _end(f"te-dist: got {group!r}, wanted a command of these:\n{_HELP}" if group else _HELP, _USAGE)
    else:
        tyro.extras.subcommand_cli_from_dict(COMMANDS[group], prog=f"te-dist {group}", args=arguments)


def _end(message: str, status: int) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
