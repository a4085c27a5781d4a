"""Writing checkpoints, at once or in the background."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from te_dist.checkpoints import extra as extras
from te_dist.checkpoints import folder, initial, model_state, optimizer_state, replicas, store
from te_dist.checkpoints.errors import CheckpointError, Ranks
from te_dist.checkpoints.manifest import Manifest, checksum, versions
from te_dist.checkpoints.part import Part


@dataclass
class _Snapshot:
    """What this rank contributes: tensors, and what the manifest says of them."""

    tensors: store.Tree
    manifest: Manifest


class _Writing(Future[None]):
    """A save in the background, which knows whether anybody has asked how it ended."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.was_asked = path, False
        self.set_running_or_notify_cancel()  # nobody can call it off, and wait for it in vain

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.was_asked = True
        return error

    def result(self, timeout: float | None = None) -> None:
        self.exception(timeout)
        return super().result()


_SHORT_WRITE = "inline_container"  # where torch's own words are of its source alone
_LITTLE = 2**30  # bytes free after a save has failed, below which that may be why
_WRITING: list[_Writing] = []  # the latest save in the background


def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint. Every rank calls it, with the same path on a file system that all of them see.

    Waits until `async_save` has written the one before it.

    Args:
        path: a directory that appears once the checkpoint is complete. A checkpoint that is there is replaced; a
            directory that holds anything else is refused.
        model: parameters and persistent buffers are saved; quantized ones as their bytes.
        optimizer: any that keeps a dictionary of tensors and plain values for each parameter.
        extra: step, position in the data, generator states: values for JSON and plain tensors, those of rank 0.

    Raises:
        CheckpointError: nothing was written under `path`; on every rank alike.
    """
    ranks = Ranks.all()
    _wait_for_writing(ranks)
    place = ranks.together(lambda: folder.destination(path))
    snapshot = _snapshot(model, optimizer, extra, ranks)
    _write(place, snapshot, ranks)


def async_save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Future[None]:
    """`save` that returns once everything is copied to the CPU, and writes in a thread of its own.

    Training may go on at once. Wait for the future before the process ends: what the writing raises is raised by its
    `result()`, and told by the next save, as a warning, where nobody has asked. A save waits until the one before it
    is written. The first call is collective beyond `save`: it makes a gloo group.
    """
    ranks = Ranks.all()
    _wait_for_writing(ranks)
    if ranks.group is not None:
        ranks = Ranks(_background_group(ranks.group))
    place = ranks.together(lambda: folder.destination(path))
    snapshot = _snapshot(model, optimizer, extra, ranks)
    snapshot = ranks.together(lambda: _on_cpu(snapshot))
    return _in_thread(lambda: _write(place, snapshot, ranks), _Writing(place))


def _wait_for_writing(ranks: Ranks) -> None:
    """Waits for the save in the background, and tells of its failure where nobody has asked. Collective."""
    # NOTE: two saves at a time would write by one group, and those to one path into one directory.
    wait(_WRITING)
    # NOTE: where a warning is an error, one rank may raise it alone.
    ranks.together(_tell_of_failure)


def _tell_of_failure() -> None:
    """Warns where a save has failed that nobody on this rank has asked about."""
    while _WRITING:
        ended = _WRITING.pop()
        if not ended.was_asked and (error := ended.exception()) is not None:
            warnings.warn(
                f"nothing was written under {ended.path} by an async_save: {type(error).__name__}: {error}; ask the "
                "result() of its future, which raises this",
                RuntimeWarning,
                stacklevel=5,
            )


def _snapshot(
    model: nn.Module, optimizer: Optimizer | None, extra: Mapping[str, Any] | None, ranks: Ranks
) -> _Snapshot:
    optimizer = optimizer_state.unwrapped(optimizer)
    named = ranks.together(lambda: _checked(model, extra))
    replicas.check(named, ranks)
    kept = initial.kept(named, ranks)
    return ranks.together(lambda: _contribution(named, optimizer, extra, kept=kept, rank=ranks.rank))


def _checked(model: nn.Module, extra: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """The tensors of a model that can be saved, by name."""
    named = model_state.named_tensors(model)
    model_state.check_quantized(named)
    model_state.check_settled(named)
    if not isinstance(extra, Mapping | None):
        raise CheckpointError(
            f'extra: got {type(extra).__name__}, wanted a dictionary of values by text; name it, as in {{"step": 100}}'
        )
    return named


def _contribution(
    named: dict[str, Tensor],
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    *,
    kept: dict[str, Tensor],
    rank: int,
) -> _Snapshot:
    tree, held = extras.split(extra or {})
    tensors = store.tree(
        model=model_state.all_parts(named),
        initial=kept,
        state={} if optimizer is None else optimizer_state.tensors(optimizer, named),
        extra=held if rank == 0 else {},
    )
    return _Snapshot(
        tensors,
        Manifest(
            model={
                name: model_state.describe(tensor) | ({initial.SAVED: True} if name in kept else {})
                for name, tensor in named.items()
            },
            optimizer=None if optimizer is None else optimizer_state.describe(optimizer, named),
            extra=tree,
            ties=model_state.ties(named),
        ),
    )


def _write(path: Path, snapshot: _Snapshot, ranks: Ranks) -> None:
    is_first = ranks.rank == 0
    manifest = _merged(snapshot.manifest, ranks)
    where = folder.temporary(path)
    ranks.together(lambda: folder.begin(path) if is_first else None)
    try:
        store.write(where, snapshot.tensors, ranks)
        own = ranks.together(lambda: _checksums(where, ranks.rank))
        manifest.files = {name: entry for files in ranks.gather(own) for name, entry in files.items()}
        ranks.together(lambda: _complete(path, manifest) if is_first else None)
    except CheckpointError as error:  # every rank has failed, so that none writes any more
        free = min(ranks.gather(folder.free_bytes(where)))
        folder.discard(path)  # on every rank: it may be one on the disk of each host
        if free < _LITTLE:
            why = f"{free / 2**20:.1f} MiB are free where {path} would lie: make room there, or save elsewhere"
        elif _SHORT_WRITE in str(error):
            why = (
                f"torch could not write a file to its end, and does not say why: a quota, or a limit of the size of "
                f"files, may be reached where {path} would lie: make room in it, or save elsewhere"
            )
        else:
            raise
        raise CheckpointError(f"{error}; {why}") from error


def _complete(path: Path, manifest: Manifest) -> None:
    where = folder.temporary(path)
    unseen = [name for name in manifest.files if not (where / name).is_file()]
    if unseen:
        raise CheckpointError(
            f"cannot save {path}: rank 0 does not see {unseen[0]}, which another rank wrote; "
            "save to a file system that all ranks share"
        )
    manifest.write(where)
    folder.publish(path)


def _checksums(where: Path, rank: int) -> dict[str, list[int]]:
    """[bytes, crc32] of the files that this rank wrote."""
    own = sorted([*where.glob(f"__{rank}_*"), *(where.glob(store.METADATA) if rank == 0 else ())])
    return {p.name: [p.stat().st_size, checksum(p)] for p in own}


def _merged(manifest: Manifest, ranks: Ranks) -> Manifest:
    """The manifest of all ranks, which hold different parameters under pipeline parallelism. Collective."""
    own = (manifest.model, manifest.optimizer, manifest.ties)
    model, optimizer, ties = own
    if ranks.differ(own):
        all_of = ranks.gather(own)
        model = _union([theirs for theirs, _, _ in all_of], "the model")
        optimizers = [theirs for _, theirs, _ in all_of if theirs is not None]
        ties = dict(chain.from_iterable(theirs.items() for _, _, theirs in all_of))
        _check_groups(optimizers)
        if optimizers:
            optimizer = optimizers[0] | {"params": _union([o["params"] for o in optimizers], "the optimizer")}
    (first, *_) = ranks.gather(manifest.extra if ranks.rank == 0 else None)
    return Manifest(model, optimizer, first, ties, versions=versions(), world_size=ranks.size)


def _check_groups(optimizers: list[dict[str, Any]]) -> None:
    for each in optimizers:
        if (each["class"], each["groups"]) != (optimizers[0]["class"], optimizers[0]["groups"]):
            raise CheckpointError(
                "optimizers of ranks differ in their class, or in number or hyperparameters of their groups, of which "
                "a checkpoint holds one list; make the same groups in the same order on every rank (some may be empty)"
            )


def _union(described: list[dict[str, Any]], what: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for each in described:
        for name, entry in each.items():
            if merged.setdefault(name, entry) != entry:
                raise CheckpointError(
                    f"ranks do not agree on {name} of {what}: got {entry} and {merged[name]}; "
                    "build the same model and optimizer on every rank"
                )
    return merged


def _on_cpu(snapshot: _Snapshot) -> _Snapshot:
    return _Snapshot(_copied(snapshot.tensors), snapshot.manifest)


def _copied(tree: Any) -> Any:
    """Every tensor of a nested dictionary in CPU memory of its own."""
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, DTensor):
        tree = Part.of_dtensor(tree)
    return tree.copied_to_cpu() if isinstance(tree, Part) else _plain_copy(tree)


def _plain_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _in_thread(work: Callable[[], None], future: _Writing) -> _Writing:
    """Does `work` in a thread of its own; `future` says how it ended."""

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="te_dist.checkpoints.async_save").start()
    _WRITING[:] = [future]
    return future


@functools.lru_cache(maxsize=1)
def _background_group(_: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of all ranks for writing only, so that its collectives never meet those of training."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group
