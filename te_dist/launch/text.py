"""Which files are trained on and which are held out: a function of their content, not of where they lie."""

from __future__ import annotations

import codecs
import fnmatch
import glob
import hashlib
import io
import math
import os
import re
import sysconfig
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from te_dist.launch import home
from te_dist.launch.config import DataConfig
from te_dist.launch.errors import JobError, require

STDLIB = "{stdlib}"
WILDCARDS = "*?["
ANY_DEPTH = "**"
BLOCK = 1 << 16  # bytes that are read at once
# Where a text may be cut: what a byte-level encoding takes for a word has white space at its beginning alone, and is
# of letters, digits or signs behind that. An apostrophe begins a word of signs and letters: "'ll".
# NOTE: not in front of all white space of Python's; \x1c to \x1f are signs like others there. Of letters and signs only
# those that have long been such to everybody: others depend on the version of Unicode that a library knows.
LETTERS = "A-Za-z\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"  # Latin, kana, ideographs, Hangul
DIGITS = "0-9"
SIGNS = "!-&(-/:-@\\[-`{-~\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"
GAP = re.compile(
    rf"(?<=\S)(?=[ \t-\r])|(?<=[{LETTERS}])(?=[{DIGITS}{SIGNS}])"
    rf"|(?<=[{DIGITS}])(?=[{LETTERS}{SIGNS}])|(?<=[{SIGNS}])(?=[{LETTERS}{DIGITS}])"
)
LONGEST = 1 << 22  # characters of a run without a gap that is passed over in silence: encoding it takes about a GiB


@dataclass(frozen=True)
class Source:
    """A text file.

    Attributes:
        text: hash with line feeds for all ends of lines: equal for files that differ in these alone.
        content: hash of the bytes.
    """

    path: Path
    text: str
    content: str

    @property
    def digest(self) -> str:
        """Of files with equal text, the least is that of the one which has line feeds alone."""
        return self.text if self.content == self.text else f"{self.text}+{self.content}"


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


def pieces(source: Source) -> Iterator[str]:
    """The text of a file, ends of lines as they are, in pieces that together have the words of the whole.

    They are about as long as a block, and longer where nothing lets them end, of which a warning tells.

    Raises:
        JobError: behind the last piece, if the file is not what it was when the source was made.
    """
    content = hashlib.sha256()
    begun: list[str] = []
    for part in _decoded(source.path, content.update):
        gap = GAP.search(part)
        if gap is not None:
            yield _joined((*begun, part[: gap.start()]), source.path)
            begun = [part[gap.start() :]]
        else:
            begun.append(part)
    if any(begun):
        yield _joined(begun, source.path)
    require(
        content.hexdigest() == source.content,
        f"text file {source.path}",
        got="one that changed while it was read",
        wanted="text that stays as it is",
        remedy="start again when nobody writes to it, or name it in data.exclude",
    )


def _joined(parts: Sequence[str], path: Path) -> str:
    """A piece; warns where it is long."""
    piece = "".join(parts)
    if len(piece) > LONGEST:
        warnings.warn(
            f"text file {path}: got {len(piece)} characters in which nothing ends a word, which are encoded together "
            "in 100 to 300 times as many bytes; wanted text with white space, or signs between letters; remedy: break "
            "it into lines, or name it in data.exclude",
            stacklevel=1,
        )
    return piece


def _path(entry: str) -> str:
    top, rest = home.split(entry)
    return top + rest.replace(STDLIB, sysconfig.get_path("stdlib"))


def _glob(entry: str) -> str:
    top, rest = home.split(entry)
    return glob.escape(top) + rest.replace(STDLIB, glob.escape(sysconfig.get_path("stdlib")))


def _patterns(entry: str) -> list[str]:
    """What the absolute path of a file is compared with: the entry as a path, as a pattern, and from any place on."""
    whole = os.path.normpath(os.path.join(glob.escape(os.getcwd()), _glob(entry)))
    return [glob.escape(os.path.abspath(_path(entry))), whole, *([entry] if entry.startswith("*") else [])]


def _matches(entry: str) -> list[Path]:
    """The files of an entry, of a glob also those that are empty."""
    path = Path(_path(entry))
    if any(wildcard in entry for wildcard in WILDCARDS) and not path.is_file():
        paths = [Path(name) for name in sorted(_expand(_glob(entry)))]
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
        got="no such file" if not path.exists() else "a directory" if path.is_dir() else "a pipe or a device",
        wanted="a text file",
        remedy="check the path, which starts at the working directory, or write a glob",
    )
    require(
        path.stat().st_size > 0, f"data.files entry {entry!r}", got="an empty file", wanted="text", remedy="take it out"
    )
    return [path]


def _expand(pattern: str) -> set[str]:
    """As `glob.glob` with `recursive=True`, which follows links to folders above them without end."""
    parts = pattern.split(os.sep)
    if ANY_DEPTH not in parts:
        return set(glob.glob(pattern))
    depth = parts.index(ANY_DEPTH)
    tops = glob.glob(os.sep.join(parts[:depth]) + os.sep) if depth else [os.curdir]
    below = os.path.join(*parts[depth + 1 :] or "*")
    folders = (folder for top in tops for folder in _folders(top))
    return {name for folder in folders for name in _expand(os.path.join(glob.escape(folder), below))}


def _folders(top: str) -> Iterator[str]:
    """A folder and those in it that are not hidden. Links are followed once, but for those to a folder they lie in.

    Each link alone, however many ways lead to it: there may be exponentially many. Those that fewer others lead to
    come first.
    """
    waiting, followed = deque([(top, frozenset())]), set()
    while waiting:
        folder, above = waiting.popleft()
        try:
            place = _place(os.stat(folder))
            entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
        except OSError:  # no folder, or one that may not be read: `glob` passes over both
            continue
        if place in above:
            continue
        yield folder
        inside = above | {place}
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_symlink():
                link = (*place, entry.name)
                if link not in followed:
                    followed.add(link)
                    waiting.append((entry.path, inside))
            elif entry.is_dir():
                waiting.appendleft((entry.path, inside))


def _place(status: os.stat_result) -> tuple[int, int]:
    """Equal for names of one folder."""
    return status.st_dev, status.st_ino


def _inspect(path: Path) -> Source:
    plain, content = hashlib.sha256(), hashlib.sha256()
    line_feeds = io.IncrementalNewlineDecoder(None, translate=True)
    for part in _decoded(path, content.update):
        plain.update(line_feeds.decode(part).encode())
    plain.update(line_feeds.decode("", final=True).encode())
    return Source(path, plain.hexdigest(), content.hexdigest())


def _decoded(path: Path, see: Callable[[bytes], object]) -> Iterator[str]:
    """The text of a file block by block, each of which `see` is given first."""
    decoder, size = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                see(block)
                size += len(block)
                yield decoder.decode(block)
            decoder.decode(b"", final=True)
    except (OSError, UnicodeDecodeError) as error:
        is_no_text = isinstance(error, UnicodeDecodeError)
        raise JobError(
            f"text file {path}",
            got=f"{error.reason} at byte {size - len(error.object) + error.start}" if is_no_text else error,
            wanted="readable UTF-8",
            remedy="convert it or name it in data.exclude",
        ) from error
