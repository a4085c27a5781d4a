"""Compiled kernels on disk, shared by processes and hosts without locks.

[Note: The kernel cache]
An entry is a file `<arch>/<key>-<compiler version>.cubin`, made of a digest and the cubin. It is written under another
name and renamed, so that a reader sees a whole entry or none, also on a shared file system; several ranks that compile
the same kernel at once write the same bytes. A reader checks the digest: what is damaged is as good as missing and is
written anew. A folder that cannot be written (read-only, full) costs a warning, not the run. Where no compiler is
installed, an entry of any compiler version serves: a cache may be filled elsewhere and shipped.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"te_dist kernel\n\0"
_DIGEST_BYTES = hashlib.sha256().digest_size


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

    def get(self, entry: Entry) -> bytes | None:
        """The cubin, or None where it is missing or damaged."""
        folder = self.folder / entry.arch
        files = [folder / entry.pattern] if entry.version else sorted(folder.glob(entry.pattern), reverse=True)
        return next((cubin for file in files if (cubin := _read(file)) is not None), None)

    def put(self, entry: Entry, cubin: bytes) -> None:
        """Writes an entry; warns where that fails."""
        folder = self.folder / entry.arch
        temporary = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False) as file:
                temporary = Path(file.name)
                file.write(_MAGIC + hashlib.sha256(cubin).digest() + cubin)
            temporary.chmod(0o644)
            os.replace(temporary, folder / entry.pattern)
        except OSError as error:
            if temporary is not None:
                with suppress(OSError):
                    temporary.unlink()
            warnings.warn(
                f"compiled CUDA kernels are not kept: {error}; every process compiles its own until "
                "TE_DIST_KERNEL_CACHE names a folder that can be written",
                stacklevel=2,
            )

    def entries(self) -> list[tuple[Path, bool]]:
        """All files of the cache, and whether each is whole."""
        return [(file, _read(file) is not None) for file in sorted(self.folder.glob("*/*.cubin"))]


def _read(file: Path) -> bytes | None:
    try:
        content = file.read_bytes()
    except OSError:
        return None
    head = len(_MAGIC) + _DIGEST_BYTES
    digest, cubin = content[len(_MAGIC) : head], content[head:]
    is_whole = content.startswith(_MAGIC) and hashlib.sha256(cubin).digest() == digest
    return cubin if is_whole else None
