"""What csrc/host declares of a library, held by the compiler against the library's own header where that is."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HOST = Path(__file__).parents[2] / "csrc" / "host"
TOOLKIT = Path("/usr/local/cuda/include")
_CONSTANT = re.compile(r"\b(k[A-Z]\w+) = (\d+)")


class Declared(NamedTuple):
    """Declarations of ours.

    Attributes:
        files: where they are, in csrc/host.
        assertions: file beside this one that compares them.
        headers: the library's, and those that it includes from elsewhere.
        wheels: that bring them.
    """

    files: tuple[str, ...]
    assertions: str
    headers: tuple[str, ...]
    wheels: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join((HOST / name).read_text() for name in self.files)

    @property
    def mistaken_constants(self) -> list[Any]:
        """Text of every constant, and what a mistake would make of it; every run takes the first."""
        texts = [(f"{name} = {value}", f"{name} = {int(value) + 1}") for name, value in _CONSTANT.findall(self.text)]
        return [pytest.param(*each, marks=pytest.mark.exhaustive if place else ()) for place, each in enumerate(texts)]

    @property
    def missing(self) -> list[str]:
        """Constants and functions that are not compared."""
        names = [name for name, _ in _CONSTANT.findall(self.text)]
        names += re.findall(r"\(\*(\w+)\)\(", self.text)
        compared = Path(__file__).with_name(self.assertions).read_text()
        return [name for name in names if not re.search(rf"\b{name}\b", compared)]

    @property
    def include_folders(self) -> list[Path]:
        """Where the headers lie; none where one is not installed."""
        return [folder for folder in map(self._folder_of, self.headers) if folder] if self.are_installed else []

    @property
    def are_installed(self) -> bool:
        return all(map(self._folder_of, self.headers))

    def _folder_of(self, header: str) -> Path | None:
        """The folder that a header is included from."""
        for wheel in self.wheels:
            try:
                files = metadata.files(wheel) or ()
            except metadata.PackageNotFoundError:
                continue
            for file in files:
                if str(file).endswith(f"include/{header}"):
                    return Path(str(file.locate())).parents[header.count("/")]
        return TOOLKIT if (TOOLKIT / header).exists() else None

    @property
    def needs_header(self) -> pytest.MarkDecorator:
        """Skips tests where the header, or a compiler, is not there."""
        return pytest.mark.skipif(
            not self.are_installed or shutil.which("g++") is None,
            reason=f"needs g++ and {' and '.join(self.headers)} (of {', '.join(self.wheels)} or a toolkit)",
        )

    def errors_with(self, headers: Path) -> str:
        """What the compiler says of the assertions over the headers of that folder, before those of csrc/host."""
        ours = [f"-I{folder}" for folder in (headers, HOST, Path(__file__).parent)]
        theirs = [f"-isystem{folder}" for folder in self.include_folders]
        assertions = str(Path(__file__).with_name(self.assertions))
        command = ["g++", "-std=c++17", "-fsyntax-only", *ours, *theirs, assertions]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    def errors_of(self, right: str, wrong: str, folder: Path) -> str:
        """The same where `right` were written as `wrong`; `folder`: an empty one."""
        assert self.text.count(right) == 1, f"{right!r} is no longer declared; mend the list of mistakes"
        for name in self.files:
            (folder / name).write_text((HOST / name).read_text().replace(right, wrong))
        return self.errors_with(folder)
