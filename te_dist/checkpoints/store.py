"""The calls into torch.distributed.checkpoint, and the keys under which tensors are stored."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from te_dist.checkpoints.errors import CheckpointError, Ranks
from te_dist.checkpoints.initial import SAVED
from te_dist.checkpoints.part import Part

Tree = dict[str, Any]  # nested dictionaries of tensors; DCP joins keys by dots


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
    with _translated(f"reading {where} failed half-way, the model may be loaded in part", ranks):
        dcp_load(tensors, storage_reader=FileSystemReader(where), process_group=ranks.group)


class WholeReader(FileSystemReader):
    """Reads whole tensors, in this process alone; what the checkpoint says of itself is read once."""

    def __init__(self, where: Path) -> None:
        super().__init__(where)
        self._metadata = super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read(self, key: str, index: int | None = None) -> Tensor:
        """A saved tensor, on the CPU: the whole, or the one at this place of its first dimension."""
        saved = self._metadata.state_dict_metadata[key]
        assert isinstance(saved, TensorStorageMetadata)
        target = held = torch.empty(saved.size if index is None else saved.size[1:], dtype=saved.properties.dtype)
        if index is not None:
            place = (index, *(0 for _ in held.shape))
            target = Part(tuple(saved.size), held[None], offset=place, skipped=(0,) * len(place))
        with _translated(f"reading {key} of {self.path} failed", Ranks(None)):
            dcp_load({key: target}, storage_reader=self, no_dist=True)
        return held


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
