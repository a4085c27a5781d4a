"""The calls into torch.distributed.checkpoint, and the keys under which tensors are stored."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from te_dist.checkpoints.errors import CheckpointError, Ranks, listed
from te_dist.checkpoints.initial import SAVED
from te_dist.checkpoints.manifest import MANIFEST, files_of
from te_dist.checkpoints.part import Part

Tree = dict[str, Any]  # nested dictionaries of tensors; DCP joins keys by dots

METADATA = ".metadata"  # DCP's pickle of what lies where
_OF_METADATA = (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,  # and no BytesStorageMetadata, whose values DCP unpickles, whatever they are
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
)
_BY_NAME: dict[str, Any] = {
    **{f"{each.__module__}.{each.__qualname__}": each for each in _OF_METADATA},
    **{str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)},
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": {str(torch.strided): torch.strided}.__getitem__,
    "pathlib.PosixPath": PurePosixPath,
    "pathlib._local.PosixPath": PurePosixPath,  # of Python 3.13
}


def tree(
    *,
    model: dict[str, Tensor],
    initial: dict[str, Tensor],
    state: dict[str, dict[str, Tensor]],
    extra: dict[str, Tensor],
) -> Tree:
    """Where tensors lie in a checkpoint: `model.<name>`, `initial.<name>`, `optimizer.state.<name>.<key>`,
    `extra.<reference>`."""
    optimizer = {"state": state} if state else {}
    whole = {"model": model, SAVED: initial, "optimizer": optimizer, "extra": extra}
    # NOTE: DCP would pickle a dictionary that is empty.
    return {key: part for key, part in whole.items() if part}


def write(where: Path, tensors: Tree, ranks: Ranks) -> None:
    """Writes this rank's parts of `tensors` into the directory `where`. Collective."""
    with _translated(f"cannot save into {where}", ranks):
        dcp_save(tensors, storage_writer=FileSystemWriter(where, sync_files=True), process_group=ranks.group)


def read(where: Path, tensors: Tree, ranks: Ranks) -> None:
    """Fills `tensors` in place from the directory `where`. Collective."""
    reader = ranks.together(lambda: _Reader(where))
    with _translated(f"reading {where} failed half-way, the model may be loaded in part", ranks):
        dcp_load(tensors, storage_reader=reader, process_group=ranks.group)


class _Unpickler(pickle.Unpickler):
    """Makes what METADATA consists of, and nothing else: a pickle may have any function called that it names."""

    def find_class(self, module: str, name: str) -> Any:
        found = _BY_NAME.get(f"{module}.{name}")
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return found


def _metadata(where: Path) -> Metadata:
    """What DCP says of the tensors in a directory.

    Raises:
        CheckpointError: it is damaged, asks for what it has no use for, or for files that nobody has checked.
    """
    try:
        with (where / METADATA).open("rb") as stream:
            found = _Unpickler(stream).load()
        used = {METADATA, *(each.relative_path for each in found.storage_data.values())}
    except Exception as error:  # of a pickle that is none, any
        raise CheckpointError(
            f"cannot load {where}: got a {METADATA} that cannot be read ({type(error).__name__}: {error}), wanted one "
            "as torch.distributed.checkpoint writes it of tensors; somebody has changed it: load another checkpoint"
        ) from error
    if unchecked := sorted(used - files_of(where)):
        raise CheckpointError(
            f"cannot load {where}: got no checksum of {listed(unchecked)} in {MANIFEST}, wanted one of every file that "
            "is read; somebody has changed it: load another checkpoint"
        )
    return found


class _Reader(FileSystemReader):
    """Reads tensors; what the checkpoint says of them is read once, and runs no code."""

    def __init__(self, where: Path) -> None:
        super().__init__(where)
        self._metadata = _metadata(where)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class WholeReader(_Reader):
    """Reads whole tensors, in this process alone."""

    def read(self, key: str, index: int | None = None) -> Tensor:
        """A saved tensor, on the CPU: the whole, or the one at this place of its first dimension."""
        saved = self._metadata.state_dict_metadata[key]
        assert isinstance(saved, TensorStorageMetadata)
        target = held = torch.empty(saved.size if index is None else saved.size[1:], dtype=saved.properties.dtype)
        if index is not None:
            place = (index, *(0 for _ in held.shape))
            target = Part(tuple(saved.size), held[None], offset=place, skipped=(0,) * len(place))
        self._fill({key: target})
        return held

    def read_all(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Saved tensors, whole, on the CPU; many at once take less time than one after the other."""
        found: dict[str, Tensor] = {}
        for key in keys:
            saved = self._metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            found[key] = torch.empty(saved.size, dtype=saved.properties.dtype)
        self._fill(dict(found))
        return found

    def _fill(self, targets: Tree) -> None:
        with _translated(f"reading {listed(list(targets))} of {self.path} failed", Ranks(None)):
            dcp_load(targets, storage_reader=self, no_dist=True)


@contextmanager
def _translated(what: str, ranks: Ranks) -> Iterator[None]:
    """DCP's errors, which it raises on all ranks, as ours; and no warning that one process is one process."""
    with ExitStack() as stack:
        if ranks.group is None:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            raise CheckpointError(f"{what}: {_reasons(error)}") from error


def _reasons(error: CheckpointException) -> str:
    """What each rank says, without its stack."""
    return "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in error.failures.items())
