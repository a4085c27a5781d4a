"""Where checkpoints lie. A checkpoint is complete or it is not there.

[Note: Complete or not there]
A checkpoint `run/step_000100` is written into `run/.step_000100.tmp`, synced to the disk, and only then renamed. One
that is replaced is renamed to `run/.step_000100.old` just before, and removed after; if the process dies between the
two renames, the old one is found under that name.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from te_dist.checkpoints.errors import CheckpointError

MANIFEST = "manifest.json"

_STEP = re.compile(r"step_(\d+)")


def temporary(path: Path) -> Path:
    """Where the checkpoint `path` is written before it is complete."""
    return path.with_name(f".{path.name}.tmp")


def retired(path: Path) -> Path:
    """Where the previous checkpoint `path` waits while the next one takes its place."""
    return path.with_name(f".{path.name}.old")


def begin(path: Path) -> Path:
    """An empty temporary directory for `path`; what an interrupted save left there is removed."""
    if path.exists() and not is_complete(path) and (path.is_file() or any(path.iterdir())):
        raise CheckpointError(f"cannot save {path}: it exists and is no checkpoint; choose another path")
    where = temporary(path)
    if where.exists():
        shutil.rmtree(where)
    where.mkdir(parents=True)
    return where


def publish(path: Path) -> None:
    """Gives the temporary directory of `path` its name, for good."""
    sync(temporary(path))
    if path.exists():
        shutil.rmtree(retired(path), ignore_errors=True)
        path.rename(retired(path))
    temporary(path).rename(path)
    sync(path.parent)
    shutil.rmtree(retired(path), ignore_errors=True)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_complete(path: Path) -> bool:
    """Whether a directory is a checkpoint: its manifest is the last file that is written."""
    return (path / MANIFEST).is_file()


def resolve(path: Path) -> Path:
    """The directory that holds the checkpoint `path`.

    Raises:
        CheckpointError: there is none.
    """
    for place in (path, retired(path)):
        if is_complete(place):
            return place
    if path.is_dir():
        raise CheckpointError(
            f"cannot load {path}: got a directory without {MANIFEST}, wanted a checkpoint of te_dist; a run directory "
            "holds checkpoints, checkpoints.latest() finds the newest one; what torch.distributed.checkpoint wrote is "
            "loaded by that"
        )
    found = _newest(path.parent)
    raise CheckpointError(
        f"cannot load {path}: there is no such directory; "
        + (f"the newest checkpoint beside it is {found}" if found else "check the path")
    )


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The checkpoint of a run directory that has the highest step (`step_000100`), None where there is none.

    Raises:
        CheckpointError: the directory is a checkpoint itself.
    """
    found = _newest(Path(directory))
    if found is None and is_complete(Path(directory)):
        raise CheckpointError(
            f"cannot look for checkpoints in {directory}: got a checkpoint, wanted the run directory that holds it; "
            f"pass {Path(directory).parent}, or load this one"
        )
    return found


def _newest(directory: Path) -> Path | None:
    steps = _steps(directory)
    return steps[max(steps)] if steps else None


def prune(directory: str | os.PathLike[str], keep: int) -> list[Path]:
    """Removes all but the `keep` newest checkpoints of a run directory, and what interrupted saves before them left.

    Not collective: to be called by one rank, after a save.

    Returns:
        The checkpoints that were removed.
    """
    if keep < 1:
        raise ValueError(f"prune keeps 1 checkpoint or more, got keep={keep}; remove the directory to keep none")
    steps = _steps(Path(directory))
    old = sorted(steps)[:-keep]
    for step in old:
        # NOTE: renamed first, so that an interruption leaves no half checkpoint under a name that counts.
        if steps[step].exists():
            shutil.rmtree(temporary(steps[step]), ignore_errors=True)
            steps[step].rename(temporary(steps[step]))
    for leftover in Path(directory).glob(".step_*"):
        match = _STEP.match(leftover.name.removeprefix("."))
        if match and _is_left_over(leftover, int(match[1]), steps, old):
            shutil.rmtree(leftover, ignore_errors=True)
    return [steps[step] for step in old]


def _is_left_over(place: Path, step: int, steps: dict[int, Path], removed: list[int]) -> bool:
    """Whether a hidden directory belongs to no save that may be going on, and is no checkpoint that is kept."""
    if step in removed:
        return True
    if place.suffix == ".old":
        return step in steps and is_complete(steps[step])
    return place.suffix == ".tmp" and step < max(steps, default=0)


def _steps(directory: Path) -> dict[int, Path]:
    """Complete checkpoints by step."""
    found: dict[int, Path] = {}
    for place in directory.glob("*step_*") if directory.is_dir() else ():
        name = place.name.removeprefix(".").removesuffix(".old") if place.name.startswith(".") else place.name
        match = _STEP.fullmatch(name)
        if match and is_complete(place) and not place.name.endswith(".tmp"):
            found[int(match[1])] = place.with_name(name)
    return found
