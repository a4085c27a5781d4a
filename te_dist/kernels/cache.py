"""Compiled kernels on disk, shared by processes and hosts without locks.

[Note: The kernel cache]
An entry is a file `<arch>/<key>-<compiler version>.cubin`, made of a digest, what the assembler said and the cubin. It
is written under another name, closed and renamed, so that a reader sees a whole entry or none, also on a shared file
system; several ranks that compile the same kernel at once write the same bytes. A reader checks the digest: what is
damaged is as good as missing and is written anew. Where no compiler is installed, an entry of any compiler version
serves: a cache may be filled elsewhere and shipped.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"te_dist kernel 3\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_RESOURCES = struct.Struct("<II?")


@dataclass(frozen=True)
class Compiled:
    """A cubin and what the assembler said about it.

    Attributes:
        registers: of a thread.
        spilled: bytes that a thread keeps in local memory for want of registers.
        serialized: whether each product of the tensor cores waits for the one before, since others touch its registers.
    """

    cubin: bytes
    registers: int
    spilled: int
    serialized: bool


@dataclass(frozen=True)
class Entry:
    """Where a cubin lies in a cache."""

    arch: str
    key: str
    version: str | None  # of the compiler; None: whichever is there

    @property
    def pattern(self) -> str:
        """Name of its file, or a pattern of names."""
        return f"{self.key}-{self.version or '*'}.cubin"


class KernelCache:
    """Cubins in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, entry: Entry) -> Compiled | None:
        """The kernel, or None where it is missing or damaged."""
        folder = self.folder / entry.arch
        files = (
            [folder / entry.pattern]
            if entry.version
            else sorted(folder.glob(entry.pattern), key=_version_in, reverse=True)
        )
        return next((compiled for file in files if (compiled := _read(file)) is not None), None)

    def put(self, entry: Entry, compiled: Compiled) -> None:
        """Writes an entry. Raises OSError where the folder cannot be written: read-only, full."""
        assert entry.version is not None
        folder = self.folder / entry.arch
        content = _RESOURCES.pack(compiled.registers, compiled.spilled, compiled.serialized) + compiled.cubin
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".")
        temporary = Path(name)
        try:
            # NOTE: a network file system may say no more before the file is closed; then nothing may be renamed.
            with open(descriptor, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(content).digest() + content)
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(0o644)
            os.replace(temporary, folder / entry.pattern)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def entries(self) -> list[tuple[Path, Compiled | None]]:
        """All files of the cache and what they hold; None where they are damaged."""
        return [(file, _read(file)) for file in sorted(self.folder.glob("*/*.cubin"))]


def _version_in(file: Path) -> list[int]:
    """Of the compiler, in the name of an entry's file."""
    return [int(part) for part in file.stem.rpartition("-")[2].split(".") if part.isdigit()]


def _read(file: Path) -> Compiled | None:
    try:
        stored = file.read_bytes()
    except OSError:
        return None
    head = len(_MAGIC) + _DIGEST_BYTES
    digest, content = stored[len(_MAGIC) : head], stored[head:]
    if not stored.startswith(_MAGIC) or hashlib.sha256(content).digest() != digest or len(content) < _RESOURCES.size:
        return None
    return Compiled(content[_RESOURCES.size :], *_RESOURCES.unpack_from(content))
