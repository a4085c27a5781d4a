"""Where checkpoints lie. A checkpoint is complete or it is not there.

[Note: Complete or not there]
A checkpoint `run/step_000100` is written into `run/.step_000100.tmp`, synced to the disk, and only then renamed. One
that is replaced is renamed to `run/.step_000100.old` just before, and removed after; if the process dies between the
two renames, the old one is found under that name. Only what a manifest of ours names is replaced or removed.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import warnings
from pathlib import Path

from te_dist.checkpoints.errors import CheckpointError, listed
from te_dist.checkpoints.manifest import MANIFEST, files_of

_STEP = re.compile(r"step_(\d+)")
_HIDDEN = re.compile(r"\.step_(\d+)\.(tmp|old)")


def destination(path: str | os.PathLike[str]) -> Path:
    """The directory that a save to `path` writes: what a link points to, whatever the working directory will be.

    Raises:
        CheckpointError: `path` ends in no name.
    """
    place = _followed(Path(path))
    if Path(path).name in ("", "..") or not place.name:
        raise CheckpointError(
            f"cannot save {path}: got a path that ends in no name, wanted that of a directory which save makes; write "
            "one, as in run/step_000100"
        )
    return place


def _followed(path: Path) -> Path:
    """An absolute path, and where it is a link, what that points to."""
    return path.resolve() if path.is_symlink() else path.absolute()


def temporary(path: Path) -> Path:
    """Where the checkpoint `path` is written before it is complete."""
    return path.with_name(f".{path.name}.tmp")


def retired(path: Path) -> Path:
    """Where the previous checkpoint `path` waits while the next one takes its place."""
    return path.with_name(f".{path.name}.old")


def begin(path: Path) -> Path:
    """An empty temporary directory for `path`; what an interrupted save left there is removed.

    Raises:
        CheckpointError: something lies at `path` that is no part of a checkpoint.
    """
    _check_replaceable(path)
    where = temporary(path)
    if where.exists():
        shutil.rmtree(where)
    where.mkdir(parents=True)
    return where


def discard(path: Path) -> None:
    """Removes what a failed save to `path` has written, as far as that can be. A checkpoint that is there stays."""
    shutil.rmtree(temporary(path), ignore_errors=True)


def free_bytes(path: Path) -> float:
    """Of the file system on which `path` lies; infinity where nobody can tell."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return math.inf


def publish(path: Path) -> None:
    """Gives the temporary directory of `path` its name, for good.

    Raises:
        CheckpointError: something lies at `path` that is no part of a checkpoint.
    """
    sync(temporary(path) / MANIFEST)
    sync(temporary(path))
    _check_replaceable(path)  # again: writing takes long
    if path.exists():
        shutil.rmtree(retired(path), ignore_errors=True)
        path.rename(retired(path))
    temporary(path).rename(path)
    sync(path.parent)
    shutil.rmtree(retired(path), ignore_errors=True)


def _check_replaceable(path: Path) -> None:
    if others := _others(path):
        what = "holds more than a checkpoint" if files_of(path) else "is no checkpoint"
        raise CheckpointError(
            f"cannot save {path}: it exists and {what}: got {listed(others)}, wanted nothing there but the files that "
            f"{MANIFEST} of a checkpoint names; choose another path, or move them away"
        )


def _others(path: Path) -> list[str]:
    """Names of what lies at `path` and is no part of a checkpoint, of which files may be missing."""
    if not path.is_dir():
        return [path.name] if path.exists() else []
    own = files_of(path)
    return sorted(place.name for place in path.iterdir() if place.name not in own or place.is_dir())


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
    for place in (path, retired(_followed(path))):
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

    Warns where there are others under other names.

    Raises:
        CheckpointError: the directory is a checkpoint itself, or has two of one step (`step_100` and `step_000100`).
    """
    found = _newest(Path(directory))
    if found is None and is_complete(Path(directory)):
        raise CheckpointError(
            f"cannot look for checkpoints in {directory}: got a checkpoint, wanted the run directory that holds it; "
            f"pass {Path(directory).parent}, or load this one"
        )
    others = [] if found or not Path(directory).is_dir() else sorted(filter(is_complete, Path(directory).iterdir()))
    if others:
        warnings.warn(
            f"no checkpoint in {directory} is named step_<number>, got {listed([other.name for other in others])}: "
            "none of them is taken for the latest; load one by its name, or name them so",
            RuntimeWarning,
            stacklevel=2,
        )
    return found


def _newest(directory: Path) -> Path | None:
    steps = _steps(directory)
    return steps[max(steps)] if steps else None


def prune(directory: str | os.PathLike[str], keep: int) -> list[Path]:
    """Removes all but the `keep` newest checkpoints of a run directory, and what interrupted saves before them left.

    Not collective: to be called by one rank, after a save. A checkpoint beside whose files something else lies is left,
    with a warning. Of one that is a link, the link is removed.

    Returns:
        The checkpoints that were removed.

    Raises:
        CheckpointError: there are two of one step.
    """
    if keep < 1:
        raise ValueError(f"prune keeps 1 checkpoint or more, got keep={keep}; remove the directory to keep none")
    steps = _steps(Path(directory))
    removed = []
    for step in sorted(steps)[:-keep]:
        place = steps[step]
        if others := _others(place):
            warnings.warn(
                f"prune leaves {place}, where something lies that is no part of a checkpoint: {listed(others)}; move "
                "it away, or remove all of it by hand",
                RuntimeWarning,
                stacklevel=2,
            )
            continue
        removed.append(step)
        if place.is_symlink():
            place.unlink()
        elif place.exists():
            # NOTE: renamed first, so that an interruption leaves no half checkpoint under a name that counts.
            shutil.rmtree(temporary(place), ignore_errors=True)
            place.rename(temporary(place))
    for leftover in Path(directory).glob(".step_*"):
        match = _HIDDEN.fullmatch(leftover.name)
        if match and _is_left_over(leftover, int(match[1]), steps, removed):
            shutil.rmtree(leftover, ignore_errors=True)
    return [steps[step] for step in removed]


def _is_left_over(place: Path, step: int, steps: dict[int, Path], removed: list[int]) -> bool:
    """Whether a hidden directory belongs to no save that may be going on, and is no checkpoint that is kept."""
    if step in removed:
        return True
    if place.suffix == ".old":
        return step in steps and is_complete(steps[step])
    return place.suffix == ".tmp" and step < max(steps, default=0)


def in_the_way(directory: Path) -> list[Path]:
    """What lies behind the newest checkpoint under names of steps, and would not be replaced by a save of that name."""
    named = [(int(match[1]), place) for place in directory.glob("step_*") if (match := _STEP.fullmatch(place.name))]
    newest = max(_steps(directory), default=-1)
    return sorted(place for step, place in named if step > newest and _others(place))


def _steps(directory: Path) -> dict[int, Path]:
    """Complete checkpoints by step.

    Raises:
        CheckpointError: there are two of one step.
    """
    found: dict[int, Path] = {}
    for place in directory.glob("*step_*") if directory.is_dir() else ():
        hidden = _HIDDEN.fullmatch(place.name)
        name = place.name[1:-4] if hidden and hidden[2] == "old" else place.name
        match = _STEP.fullmatch(name)
        if not match or not is_complete(place):
            continue
        step, shown = int(match[1]), place.with_name(name)
        if found.setdefault(step, shown) != shown:
            raise CheckpointError(
                f"{directory}: got two checkpoints of step {step}, {found[step].name} and {name}, wanted one; "
                "rename one, or move it away"
            )
    return found
