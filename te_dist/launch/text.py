"""Which files are trained on and which are held out: a function of their content, not of where they lie."""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import math
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from te_dist.launch.config import DataConfig
from te_dist.launch.errors import JobError, require

STDLIB = "{stdlib}"
WILDCARDS = "*?["
HASH_DIGITS = 64  # of SHA-256


@dataclass(frozen=True)
class Source:
    """A text file.

    Attributes:
        digest: hash of the text with line feeds for all ends of lines, and where it has others, that of the bytes.
    """

    path: Path
    digest: str

    @property
    def text(self) -> str:
        """Equal for files that differ in the ends of their lines alone."""
        return self.digest[:HASH_DIGITS]


@dataclass(frozen=True)
class Split:
    """Files with distinct content, in the order of their hashes; the first ones are held out."""

    training: tuple[Source, ...]
    validation: tuple[Source, ...]


def split(config: DataConfig) -> Split:
    """Finds the files and holds some out.

    The order of hashes is as good as a shuffled one and the same on every machine; a file that appears twice under
    different names, or with other ends of lines, counts once and so never lies on both sides.

    Raises:
        JobError: a file that is missing, empty or not UTF-8, a glob without a match, too few files to hold one out.
    """
    found = sorted(map(_inspect, find(config)), key=lambda source: source.digest, reverse=True)
    sources = list({source.text: source for source in found}.values())[::-1]
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
    """The files named by the configuration, each once. A glob skips empty files; a name must hold text.

    Raises:
        JobError: an entry that finds no text, or excludes no file.
    """
    patterns = {entry: _patterns(entry) for entry in config.exclude}
    in_use: set[str] = set()
    found: dict[str, Path] = {}
    for entry in config.files:
        for path in _matches(entry):
            place = os.path.abspath(path)
            by = [name for name, own in patterns.items() if any(fnmatch.fnmatch(place, each) for each in own)]
            in_use.update(by)
            if not by and path.stat().st_size:
                found.setdefault(place, path)
    for entry in config.exclude:
        # NOTE: what the standard library consists of depends on the interpreter, and the default names some of it.
        require(
            entry in in_use or entry.startswith(STDLIB),
            f"data.exclude entry {entry!r}",
            got="none of the files of data.files",
            wanted="a path or a pattern of paths that fits one",
            remedy="correct it (of a directory write all files, DIR/*; links are not followed), or take it out",
        )
    require(
        len(found) > 0,
        "data.files",
        got="no file that data.exclude leaves",
        wanted="text",
        remedy="name other files or shorten data.exclude",
    )
    return list(found.values())


def read(source: Source) -> str:
    """The text of a file, ends of lines as they are."""
    return source.path.read_bytes().decode("utf-8")


def _path(entry: str) -> str:
    return entry.replace(STDLIB, sysconfig.get_path("stdlib"))


def _glob(entry: str) -> str:
    return entry.replace(STDLIB, glob.escape(sysconfig.get_path("stdlib")))


def _patterns(entry: str) -> list[str]:
    """What the absolute path of a file is compared with: the entry as a path, as a pattern, and from any place on."""
    whole = os.path.normpath(os.path.join(glob.escape(os.getcwd()), _glob(entry)))
    return [glob.escape(os.path.abspath(_path(entry))), whole, *([entry] if entry.startswith("*") else [])]


def _matches(entry: str) -> list[Path]:
    """The files of an entry, of a glob also those that are empty."""
    path = Path(_path(entry))
    if any(wildcard in entry for wildcard in WILDCARDS) and not path.is_file():
        paths = [Path(name) for name in sorted(glob.glob(_glob(entry), recursive=True))]
        files = [path for path in paths if path.is_file()]
        require(
            any(path.stat().st_size for path in files),
            f"data.files entry {entry!r}",
            got=f"{len(paths)} matches and no text in them",
            wanted="a glob that finds text files",
            remedy="check the pattern; relative ones start at the working directory",
        )
        return files
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
    return [path]


def _inspect(path: Path) -> Source:
    try:
        content = path.read_bytes()
        content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(
            f"text file {path}", got=error, wanted="readable UTF-8", remedy="convert it or name it in data.exclude"
        ) from error
    plain = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    hashes = [hashlib.sha256(each).hexdigest() for each in dict.fromkeys((plain, content))]
    return Source(path, "+".join(hashes))
