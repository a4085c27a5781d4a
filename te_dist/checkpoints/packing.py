"""Checkpoints of packed weights, read into a model of separate ones, and the other way round.

A layer of experts has either one parameter `weight` of all of them, or `weight0`, `weight1` and so on. What is saved
of the first is what is saved of the second with one dimension more in front: so a part of either can be described in
the terms of the other, and nothing is read twice or copied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.tensor import DTensor

from te_dist.checkpoints.initial import SAVED
from te_dist.checkpoints.manifest import Manifest
from te_dist.checkpoints.part import Part

ByName = dict[str, dict[str, Tensor]]
Key = tuple[str, str]  # of a saved tensor: what stands before the name that it belongs to, and behind it
_NUMBERED = re.compile(r"(.*\D)(\d+)")


@dataclass
class Packing:
    """How names of a model differ from those of a checkpoint.

    Attributes:
        packed: by saved name of a packed tensor, the names of the separate ones that the model has.
        separate: by name of a packed tensor of the model, the saved names of separate ones.
    """

    packed: dict[str, list[str]] = field(default_factory=dict)
    separate: dict[str, list[str]] = field(default_factory=dict)

    @staticmethod
    def of(named: Mapping[str, Tensor], saved: Mapping[str, dict[str, Any]]) -> Packing:
        """What has to be packed or taken apart so that what is saved can be read into tensors of these names.

        Args:
            saved: by name, what is said of a tensor: its "shape" among others.
        """
        found = Packing()
        for stem, names in _split(named, saved):
            if saved[stem]["shape"][:1] == [len(names)] and not any(name in saved for name in names):
                found.packed[stem] = names
        for stem, names in _split(saved, named):
            if named[stem].shape[:1] == (len(names),):
                found.separate[stem] = names
        return found

    @staticmethod
    def miscounted(named: Mapping[str, Tensor], saved: Mapping[str, dict[str, Any]]) -> list[str]:
        """What would be packed or taken apart, were there as many as in the model; `named`, `saved`: as of `of`."""
        problems = []
        for stem, names in _split(named, saved):
            count, *shape = saved[stem]["shape"] or [len(names)]
            if count != len(names) and shape == list(named[names[0]].shape):
                problems.append(f"{stem} has {count} members, wanted {len(names)}: {names[0]} to {names[-1]}")
        for stem, names in _split(saved, named):
            count, *_ = named[stem].shape or (len(names),)
            if count != len(names):
                problems.append(f"{names[0]} to {names[-1]} are {len(names)}, wanted {count} for {stem}")
        return problems

    @cached_property
    def _place_of(self) -> dict[str, tuple[str, int]]:
        """By name of a separate tensor of the model, that of the packed one that is saved, and its place there."""
        return {name: (stem, i) for stem, names in self.packed.items() for i, name in enumerate(names)}

    @cached_property
    def _packed_by(self) -> dict[str, str]:
        """By saved name of a separate tensor, that of the packed one that the model has."""
        return {name: stem for stem, names in self.separate.items() for name in names}

    def targets_of(self, name: str, named: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """By names of the model, what a saved tensor fills at least a part of: the shape it has for that."""
        if name in self.packed:
            names = self.packed[name]
            return {each: [len(names), *named[each].shape] for each in names}
        if name in self._packed_by:
            stem = self._packed_by[name]
            return {stem: list(named[stem].shape[1:])}
        return {name: list(named[name].shape)} if name in named else {}

    def sources_of(self, name: str) -> list[tuple[str, int | None]]:
        """The saved names of what a tensor of the model is read from, and which member of each, None for the whole."""
        if name in self._place_of:
            return [self._place_of[name]]
        return [(each, None) for each in self.separate.get(name, [name])]

    def adapted(self, manifest: Manifest) -> Manifest:
        """The manifest that the checkpoint would have, had it been saved from a model of these names."""
        model = _renamed(manifest.model, self, _of_one, _of_all)
        optimizer = manifest.optimizer
        if optimizer is not None:
            optimizer = optimizer | {"params": _renamed(optimizer["params"], self, _state_of_one, _state_of_all)}
        return replace(manifest, model=model, optimizer=optimizer)

    def targets(self, wanted: Mapping[str, Mapping[str, Tensor]]) -> tuple[ByName, list[tuple[Tensor, Tensor]]]:
        """By saved name what fills `wanted`, which is by name of the model and by what belongs to that name.

        Returns:
            The targets, and pairs of tensors the first of which is copied into the second once it is filled.
        """
        found: ByName = {}
        stacks: dict[tuple[str, str], dict[int, Tensor]] = {}
        copies = []
        for name, own in wanted.items():
            for key, target in own.items():
                if name in self.separate:
                    for i, part in _members(target).items():
                        found.setdefault(self.separate[name][i], {})[key] = part
                elif name not in self._place_of:
                    found.setdefault(name, {})[key] = target
                elif target.dim():
                    stem, i = self._place_of[name]
                    stacks.setdefault((stem, key), {})[i] = target
                else:  # the count of steps, which is one for all
                    first = found.setdefault(self._place_of[name][0], {}).setdefault(key, target)
                    copies += [(first, target)] if first is not target else []
        for (stem, key), members in stacks.items():
            found.setdefault(stem, {})[key] = Stack(members, len(self.packed[stem]))
        return found, copies

    def read(self, name: str, key: Key, read: Callable[[str, int | None], Tensor]) -> Tensor:
        """The whole of a tensor that belongs to `name` of the model.

        Args:
            key: of the tensor, around the name.
            read: a saved tensor by its key, whole or the one at this place of its first dimension.
        """
        start, rest = key
        if name in self._place_of:
            stem, index = self._place_of[name]
            return read(start + stem + rest, index)
        if name in self.separate:
            return torch.stack([read(start + each + rest, None) for each in self.separate[name]])
        return read(start + name + rest, None)


class Stack(Part):
    """Separate tensors as those members of a packed one that this rank has something of; for reading only.

    Attributes:
        parts: by place of its first value in the packed tensor, what is filled.
    """

    parts: dict[tuple[int, ...], Tensor]

    @staticmethod
    def __new__(cls, members: dict[int, Tensor], count: int) -> Stack:
        first = next(iter(members.values()))
        return torch.Tensor._make_wrapper_subclass(
            cls, torch.Size((count, *first.shape)), dtype=first.dtype, device=first.device
        )

    def __init__(self, members: dict[int, Tensor], count: int) -> None:
        parts = {index: _as_part(target) for index, target in members.items()}
        self.parts = {(index, *part.offset): part.held[None] for index, part in parts.items()}

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size(o), sizes=held.shape) for o, held in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[tuple(index.offset)]


def _families(names: Mapping[str, Any]) -> dict[str, list[str]]:
    """By stem, names that are the stem and a number, where these count from 0 on without a gap."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match:
            numbers.setdefault(match[1], []).append(int(match[2]))
    whole = {stem: sorted(found) for stem, found in numbers.items() if not stem.endswith(".")}
    return {s: [f"{s}{n}" for n in found] for s, found in whole.items() if found == list(range(len(found)))}


def _split(names: Mapping[str, Any], others: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Families of `names` of which `others` have the stem, as one tensor, and `names` do not."""
    return ((stem, its) for stem, its in _families(names).items() if stem in others and stem not in names)


def _renamed(
    entries: dict[str, Any],
    packing: Packing,
    of_one: Callable[[Any], Any],
    of_all: Callable[[Sequence[Any]], Any],
) -> dict[str, Any]:
    """Entries by saved names, under those of the model."""
    gone = {*packing.packed, *(name for names in packing.separate.values() for name in names)}
    found = {name: entry for name, entry in entries.items() if name not in gone}
    for stem, names in packing.packed.items():
        if stem in entries:
            found |= {name: of_one(entries[stem]) for name in names}
    for stem, names in packing.separate.items():
        if all(name in entries for name in names):
            found[stem] = of_all([entries[name] for name in names])
    return found


def _of_one(described: dict[str, Any]) -> dict[str, Any]:
    """What is said of a member, by what is said of all of them together."""
    return {key: value for key, value in described.items() if key != "members"} | {"shape": described["shape"][1:]}


def _of_all(described: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is said of all members together; what is said of one where they are not alike, which nothing matches."""
    known: dict[str, Any] = {SAVED: True} if all(each.get(SAVED) for each in described) else {}
    described = [{key: value for key, value in each.items() if key != SAVED} for each in described]
    first, count = described[0] | known, len(described)
    if any(each != described[0] for each in described):
        return first
    return first | {"shape": [count, *first["shape"]]} | ({"members": count} if "format" in first else {})


def _state_of_one(described: dict[str, Any]) -> dict[str, Any]:
    return described | {"state": {k: _of_one(s) if s.get("shape") else s for k, s in described["state"].items()}}


def _state_of_all(described: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is said of the state of all members together; `differs` where they are not alike, and it cannot be read."""
    first = described[0]
    if any(each != first for each in described):
        return first | {"differs": True}
    states = {
        key: _of_all([each["state"][key] for each in described]) if state.get("shape") else state
        for key, state in first["state"].items()
    }
    return first | {"state": states}


def _members(target: Tensor) -> dict[int, Tensor]:
    """By member, what is filled of it on this rank, as a tensor that was saved alone."""
    if not target.dim():
        return {0: target}  # the count of steps, which is one for all
    part = _as_part(target)
    return {
        part.offset[0] + i: Part(tuple(part.shape[1:]), held, offset=part.offset[1:], skipped=part.skipped[1:])
        for i, held in enumerate(part.held)
    }


def _as_part(target: Tensor) -> Part:
    if isinstance(target, Part):
        return target
    if isinstance(target, DTensor):
        return Part.of_dtensor(target)
    return Part(tuple(target.shape), target, offset=(0,) * target.dim(), skipped=(0,) * target.dim())
