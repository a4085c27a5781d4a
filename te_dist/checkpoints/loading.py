"""Reading checkpoints: everything is checked before anything is written into the model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from te_dist.checkpoints import agreement, conversion, folder, initial, model_state, optimizer_state, store
from te_dist.checkpoints import extra as extras
from te_dist.checkpoints.errors import CheckpointError, Ranks, listed
from te_dist.checkpoints.manifest import Manifest
from te_dist.checkpoints.packing import Key, Packing
from te_dist.tensor.tally import Tallying


@dataclass
class _Plan:
    """What is read into what.

    Attributes:
        where: directory of the checkpoint.
        manifest: what is said of it, by the names of the model.
        digest: of that as it was saved, which no other checkpoint has.
        named: tensors of the model.
        converted: by name of a tensor whose format is another one, the key of its high-precision values.
        initial: by name of a weight that keeps it, what it was quantized from, to be filled.
        states: by parameter, the optimizer state to be filled.
        packing: how names of the checkpoint differ from those of the model.
        extra: tensors of the user, to be filled, by reference.
        unexpected: saved names that this rank has no use for.
    """

    where: Path
    manifest: Manifest
    digest: str
    named: dict[str, Tensor]
    converted: dict[str, Key]
    packing: Packing
    initial: dict[str, Tensor] = field(default_factory=dict)
    states: dict[Tensor, dict[str, Any]] = field(default_factory=dict)
    extra: dict[str, Tensor] = field(default_factory=dict)
    unexpected: set[str] = field(default_factory=set)

    @property
    def read_directly(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.named.items() if name not in self.converted}

    def reads_state(self, optimizer: Optimizer | None) -> bool | None:
        """Whether state of this rank's parameters is read; None where none is saved, as of a stage without any."""
        saved = {} if self.manifest.optimizer is None else self.manifest.optimizer["params"]
        return optimizer is not None if self.named.keys() & saved.keys() else None

    def check_alike(self) -> None:
        """Raises CheckpointError where what several saved tensors have to be read into one of differs."""
        problems: list[str] = []
        for name, first in model_state.ties(self.named).items():
            if self._source(name) != self._source(first):
                keys = {each: self._keys(each) for each in (first, name)}
                is_coded = len(keys[first]) > 1  # read field by field
                dtype = None if is_coded else conversion.dtype_of(self.named[first])
                problems += agreement.of_ties(keys, self.packing, self._read, dtype=dtype)
        if self.states and self.manifest.optimizer is not None:
            problems += agreement.of_steps(self.packing, self.manifest.optimizer["params"], self._read_all)
        agreement.check(problems, self.where)

    @cached_property
    def _reader(self) -> store.WholeReader:
        return store.WholeReader(self.where)

    def _read(self, key: str, index: int | None) -> Tensor:
        return self._reader.read(key, index)

    def _read_all(self, keys: Sequence[str]) -> dict[str, Tensor]:
        return self._reader.read_all(keys) if keys else {}

    def _source(self, name: str) -> list[tuple[str, int | None]]:
        """What a tensor is read from, see `Packing.sources_of`; of names that were tied the first."""
        return [(self.manifest.ties.get(each, each), index) for each, index in self.packing.sources_of(name)]

    def _keys(self, name: str) -> list[Key]:
        """Of what a tensor is read from."""
        if name in self.converted:
            return [self.converted[name]]
        return [("model.", key.removeprefix(name)) for key in model_state.parts(name, self.named[name])]

    def finish(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """What is left to do on this rank once all targets are filled."""
        model_state.finish_reading(self.named)
        for module in model.modules():
            if isinstance(module, Tallying):
                module.clear_tally()
        initial.install(self.named, self.initial)
        conversion.convert(self.where, self.named, self.converted, packing=self.packing)
        if optimizer is not None and self.manifest.optimizer is not None:
            optimizer_state.install(optimizer, self.states, self.manifest.optimizer)

    def read(self, ranks: Ranks) -> None:
        """Fills all targets in place. Collective."""
        model_state.all_parts(self.read_directly)  # raises where names collide
        by_name = {name: model_state.parts(name, tensor) for name, tensor in self.read_directly.items()}
        by_suffix = {n: {key.removeprefix(n): part for key, part in own.items()} for n, own in by_name.items()}
        model, _ = self.packing.targets(by_suffix)
        state, copies = self.packing.targets(
            optimizer_state.state_parts(self.states, self.named, self.manifest.optimizer)
        )
        kept, _ = self.packing.targets({name: {"": blank} for name, blank in self.initial.items()})
        tree = store.tree(model=_keyed(model), initial=_keyed(kept), state=state, extra=self.extra)
        store.read(self.where, tree, ranks)
        for source, target in copies:
            target.copy_(source)


def _keyed(found: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """By key, what is found by name and by what belongs to that name."""
    return {name + suffix: part for name, own in found.items() for suffix, part in own.items()}


@torch.no_grad()
def load(path: str | os.PathLike[str], *, model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Reads a checkpoint, written by any number of processes, into model and optimizer. Every rank calls it.

    Bytes of quantized parameters are those that were saved. Where the model wants another format than was saved, its
    bytes are made from saved high-precision values (masters of the optimizer, what a weight keeps of the values it was
    quantized from, or a plain parameter), and an error is raised where there are none. Tensors of all experts in one
    (`weight`) are read into one for each (`weight0`, `weight1`, ...), and the other way round, with the state of the
    optimizer.

    Args:
        path: a checkpoint, the same on every rank.
        model: as it will be trained: sharded, not on the meta device; its present values do not matter.
        optimizer: of the class that was saved; None leaves saved optimizer state where it is.

    Returns:
        What was saved as `extra`.

    Raises:
        CheckpointError: the checkpoint is not there, damaged, or of another model; on every rank alike, and before
            anything was changed.
    """
    ranks, optimizer = Ranks.all(), optimizer_state.unwrapped(optimizer)
    plan = ranks.together(lambda: _plan(_given(path), model, optimizer))
    found = ranks.gather(_Found(plan.unexpected, plan.digest, str(path), plan.reads_state(optimizer)))
    _check_same(found)
    unexpected = set.intersection(*(each.unexpected for each in found))
    if unexpected:
        raise CheckpointError(
            f"cannot load {path}: it holds what the model and its optimizer have not: {listed(sorted(unexpected))}; "
            "build the model that was saved, and its optimizer of the same parameters, or load without optimizer=; "
            "where its recipe keeps histories, te_dist.prepare it by that (module.scaling = None drops them after "
            "loading)"
        )
    ranks.together(lambda: plan.manifest.verify(plan.where, ranks.rank, ranks.size))
    ranks.together(plan.check_alike)
    plan.read(ranks)
    ranks.together(lambda: plan.finish(model, optimizer))
    return extras.join(plan.manifest.extra, plan.extra)


class _Found(NamedTuple):
    """What a rank is about to read: see `_Plan`, and what it was given."""

    unexpected: set[str]
    digest: str
    path: str
    reads_state: bool | None


def _check_same(found: Sequence[_Found]) -> None:
    """Raises CheckpointError where ranks would read different checkpoints, or different parts of one."""
    for what, values in (
        ("a checkpoint", [each.digest for each in found]),
        ("whether there is an optimizer", [each.reads_state for each in found]),
    ):
        told = [rank for rank, value in enumerate(values) if value is not None]
        other = next((rank for rank in told if values[rank] != values[told[0]]), None)
        if other is None:
            continue
        got = [
            f"{found[rank].path} with{'' if found[rank].reads_state else 'out'} an optimizer on rank {rank}"
            for rank in (told[0], other)
        ]
        raise CheckpointError(
            f"cannot load: ranks differ in {what}: got {' and '.join(got)}, wanted the same on all. Of a file system "
            "on which hosts see each other's files late, give all of them what one rank finds, by "
            "torch.distributed.broadcast_object_list"
        )


def _given(path: str | os.PathLike[str] | None) -> Path:
    if path is None:
        raise CheckpointError(
            "path: got None, as `latest` gives where a folder holds no step_<number>, wanted a checkpoint; train from "
            "the start where there is none"
        )
    return Path(path)


def _plan(path: Path, model: nn.Module, optimizer: Optimizer | None) -> _Plan:
    where = folder.resolve(path)
    manifest, named = Manifest.read(where), model_state.named_tensors(model)
    digest = manifest.digest
    packing = Packing.of(named, manifest.model)
    manifest = packing.adapted(manifest)
    model_state.check_quantized(named)
    converted, problems = conversion.compare(named, manifest)
    fits = not problems
    if optimizer is not None:
        members = {name for names in packing.packed.values() for name in names if named[name].dim() < 2}  # noqa: PLR2004
        packs = {name for name in packing.separate if named[name].dim() == 2}  # noqa: PLR2004
        problems += optimizer_state.mismatches(
            optimizer, named, manifest, converted=converted, packed_otherwise=members | packs
        )
    if problems:
        remedy = "load it into the model that was saved, or choose another checkpoint"
        if fits:
            remedy = (
                "make the optimizer that was saved, of the same parameters, or load without optimizer=: "
                "its state begins anew"
            )
        histories = model_state.histories(model)
        if any(id(tensor) in histories for name, tensor in named.items() if name not in manifest.model):
            remedy += (
                "; where it has no histories of delayed scaling, te_dist.prepare makes them after loading, in a model "
                "that was made by a recipe of the same weights without any"
            )
        raise CheckpointError(f"cannot load {path}: {listed(problems)}; {remedy}")
    plan = _Plan(where, manifest, digest, named, converted, packing, extra=extras.allocate(manifest.extra))
    plan.unexpected = set(manifest.model) - set(named)
    plan.initial = initial.to_fill(named, manifest, converted)
    if optimizer is not None and manifest.optimizer is not None:
        plan.states = optimizer_state.allocate(optimizer, named, manifest.optimizer)
        missing = optimizer_state.unexpected(optimizer, named, manifest.optimizer)
        plan.unexpected |= {f"optimizer state of {name}" for name in missing}
    return plan
