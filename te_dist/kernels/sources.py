"""The CUDA sources that travel with the package, and a fingerprint of them."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_PARTS = ("cuda", "numerics")


@cache
def folder() -> Path:
    """Where `cuda/` and `numerics/` lie: in the package once installed, beside it in a source tree."""
    for candidate in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        if all((candidate / part).is_dir() for part in _PARTS):
            return candidate
    raise FileNotFoundError(f"te_dist's CUDA sources are not in {_PACKAGE / 'csrc'}; reinstall te_dist")


@cache
def fingerprint() -> str:
    """Digest of all sources: names and contents."""
    digest = hashlib.sha256()
    for part in _PARTS:
        for file in sorted((folder() / part).rglob("*.*h")):
            digest.update(file.relative_to(folder()).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
