"""Which files are trained on and which are held out: a function of their content, not of where they lie."""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from te_dist.launch.config import DataConfig
from te_dist.launch.errors import JobError, require

WILDCARDS = "*?["


@dataclass(frozen=True)
class Source:
    """A text file and the hash of its bytes."""

    path: Path
    digest: str


@dataclass(frozen=True)
class Split:
    """Files with distinct content, in the order of their hashes; the first ones are held out."""

    training: tuple[Source, ...]
    validation: tuple[Source, ...]


def split(config: DataConfig) -> Split:
    """Finds the files and holds some out.

    The order of hashes is as good as a shuffled one and the same on every machine; a file that appears twice under
    different names counts once and so never lies on both sides.

    Raises:
        JobError: a file that is missing, empty or not UTF-8, a glob without a match, too few files to hold one out.
    """
    sources = sorted({source.digest: source for source in map(_inspect, find(config))}.values(), key=lambda s: s.digest)
    held_out = math.ceil(config.validation_fraction * len(sources))
    require(
        0 < held_out < len(sources),
        "data.files",
        got=f"{len(sources)} different files, {held_out} of them held out by data.validation_fraction",
        wanted="a file or more on both sides",
        remedy="name more files or change data.validation_fraction",
    )
    return Split(tuple(sources[held_out:]), tuple(sources[:held_out]))


def find(config: DataConfig) -> list[Path]:
    """The files named by the configuration, each once. A glob skips empty files; a name must hold text."""
    excluded = [_expand(pattern) for pattern in config.exclude]
    found: dict[Path, None] = {}
    for entry in config.files:
        pattern = _expand(entry)
        for path in _matches(pattern, entry):
            if not any(fnmatch.fnmatch(str(path), pattern) for pattern in excluded):
                found[path] = None
    require(
        len(found) > 0,
        "data.files",
        got="no file that data.exclude leaves",
        wanted="text",
        remedy="name other files or shorten data.exclude",
    )
    return list(found)


def read(source: Source) -> str:
    """The text of a file."""
    return source.path.read_text(encoding="utf-8")


def _expand(pattern: str) -> str:
    return pattern.replace("{stdlib}", sysconfig.get_path("stdlib"))


def _matches(pattern: str, entry: str) -> Iterator[Path]:
    if any(wildcard in pattern for wildcard in WILDCARDS):
        paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
        texts = [path for path in paths if path.is_file() and path.stat().st_size]
        require(
            len(texts) > 0,
            f"data.files entry {entry!r}",
            got=f"{len(paths)} matches and no text in them",
            wanted="a glob that finds text files",
            remedy="check the pattern; relative ones start at the working directory",
        )
        yield from texts
        return
    path = Path(pattern)
    require(
        path.is_file(),
        f"data.files entry {entry!r}",
        got="no such file" if not path.exists() else "a directory",
        wanted="a text file",
        remedy="check the path, which starts at the working directory, or write a glob",
    )
    require(
        path.stat().st_size > 0, f"data.files entry {entry!r}", got="an empty file", wanted="text", remedy="take it out"
    )
    yield path


def _inspect(path: Path) -> Source:
    try:
        content = path.read_bytes()
        content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(
            f"text file {path}", got=error, wanted="readable UTF-8", remedy="convert it or name it in data.exclude"
        ) from error
    return Source(path, hashlib.sha256(content).hexdigest())
