"""Checkpoints that somebody has changed, checksums included."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata


class Touch:
    """What creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def rewrite_manifest(path: Path, **changes: object) -> None:
    """Puts other entries into the manifest of a checkpoint."""
    manifest = path / "manifest.json"
    body = json.dumps(json.loads(json.loads(manifest.read_text())["body"]) | changes)
    manifest.write_text(json.dumps({"body": body, "crc32": zlib.crc32(body.encode())}))


def files_of(path: Path) -> dict[str, list[int]]:
    """Sizes and checksums in the manifest of a checkpoint."""
    return json.loads(json.loads((path / "manifest.json").read_text())["body"])["files"]


def rewrite_metadata(path: Path, data: bytes) -> None:
    """Puts other bytes into `.metadata`, and their checksum into the manifest."""
    (path / ".metadata").write_bytes(data)
    rewrite_manifest(path, files=files_of(path) | {".metadata": [len(data), zlib.crc32(data)]})


def change_metadata(path: Path, change: Callable[[Metadata], Any]) -> None:
    """Changes what `.metadata` says."""
    metadata = FileSystemReader(path).read_metadata()
    change(metadata)
    rewrite_metadata(path, pickle.dumps(metadata))
