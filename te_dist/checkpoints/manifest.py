"""The manifest: what a checkpoint holds, in JSON, and the sizes and checksums of its files."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from te_dist.checkpoints.errors import CheckpointError, digest_of, listed

MANIFEST = "manifest.json"
LAYOUT = 1  # of manifest and keys; raised when a reader of the old one would go wrong

_CHUNK = 1 << 24  # bytes read at once


@dataclass
class Manifest:
    """What is said of a checkpoint beside its tensors.

    Attributes:
        model: by name, `model_state.describe` of the tensor.
        optimizer: `optimizer_state.describe` of the optimizer; None where none was saved.
        extra: the tree handed over by the user, tensors replaced by references.
        ties: by name of a tensor that has another one before it, that one.
        files: by name, [bytes, crc32].
        versions: of torch and te_dist.
        world_size: number of processes that wrote it.
    """

    model: dict[str, dict[str, Any]]
    optimizer: dict[str, Any] | None
    extra: Any
    ties: dict[str, str] = field(default_factory=dict)
    files: dict[str, list[int]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    world_size: int = 1

    @property
    def digest(self) -> str:
        """That of no other checkpoint: files and their checksums are in it."""
        return digest_of(asdict(self))

    def write(self, where: Path) -> None:
        """Writes it into the directory `where`, with a checksum of its own."""
        body = json.dumps({"layout": LAYOUT, **asdict(self)})  # in the order of `extra`
        (where / MANIFEST).write_text(json.dumps({"crc32": zlib.crc32(body.encode()), "body": body}))

    @staticmethod
    def read(where: Path) -> Manifest:
        """Reads the manifest in the directory `where`.

        Raises:
            CheckpointError: it is damaged, or of another layout.
        """
        body = _body(where)
        layout = body.pop("layout")
        if layout != LAYOUT:
            raise CheckpointError(
                f"cannot load {where}: got a checkpoint of layout {layout} (te_dist {body['versions']['te_dist']}), "
                f"wanted layout {LAYOUT}; load it with that te_dist"
            )
        return Manifest(**body)

    def verify(self, where: Path, rank: int, size: int) -> None:
        """Compares this rank's share of the files with what was written.

        Raises:
            CheckpointError: files are missing, or hold other bytes.
        """
        problems = []
        for name in sorted(self.files)[rank::size]:
            path, (want_bytes, want_crc) = where / name, self.files[name]
            if not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size != want_bytes:
                problems.append(f"{name} has {path.stat().st_size} bytes, wanted {want_bytes}")
            elif checksum(path) != want_crc:
                problems.append(f"{name} does not match its checksum")
        if problems:
            raise _damaged(where, problems)


def files_of(where: Path) -> set[str]:
    """Names of the files of the checkpoint in a directory, by its manifest; none where that is damaged, or not ours."""
    try:
        return {MANIFEST, *_body(where)["files"]}
    except (CheckpointError, KeyError, TypeError):
        return set()


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def versions() -> dict[str, str]:
    """Versions of torch and te_dist in this process."""
    try:
        own = metadata.version("te_dist")
    except metadata.PackageNotFoundError:
        own = "not installed"
    return {"torch": torch.__version__, "te_dist": own}


def _body(where: Path) -> dict[str, Any]:
    """What the manifest in a directory says, of whatever layout.

    Raises:
        CheckpointError: it is damaged, or not ours.
    """
    try:
        outer = json.loads((where / MANIFEST).read_text())
        intact = zlib.crc32(outer["body"].encode()) == outer["crc32"]
        body = json.loads(outer["body"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(where, [f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"]) from error
    if not intact:
        raise _damaged(where, [f"{MANIFEST} does not match its checksum"])
    return body


def _damaged(where: Path, problems: list[str]) -> CheckpointError:
    return CheckpointError(
        f"cannot load {where}: it is damaged: {listed(problems)}; wanted the files as they were written; load an older "
        "checkpoint (checkpoints.latest() finds them once this one is removed)"
    )
