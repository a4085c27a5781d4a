"""Weights as safetensors, by the names the model has for them: in high precision, or as an inference engine wants them.

Rank 0 has one file in memory at a time. Files follow the layout of Hugging Face: numbered, with an index.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from te_dist.checkpoints import (
    agreement,
    conversion,
    foreign,
    initial,
    model_state,
    optimizer_state,
    replicas,
    weight_files,
)
from te_dist.checkpoints.errors import CheckpointError, Ranks, listed
from te_dist.checkpoints.packing import Packing
from te_dist.checkpoints.part import Part
from te_dist.conventions import Convention, names_a_scale
from te_dist.formats import Field, Region
from te_dist.grouped import GroupedStorage, first_member
from te_dist.tensor import QuantizedTensor
from te_dist.tensor.placement import has_first_copy, local_tensor

FILE_BYTES = 5 << 30  # a file is closed before it grows beyond

Named = dict[str, Tensor]


@dataclass(frozen=True)
class _Entry:
    """One tensor of the files.

    Attributes:
        key, dtype: its name and dtype there.
        nbytes: of the whole.
        held: makes what this rank has of it: a Part where ranks hold different values, else the whole.
        cast: values are converted to `dtype`; otherwise their bytes are read as it.
        is_given: whether this rank's part counts; copies of it may have drifted apart, of which one is taken.
    """

    key: str
    dtype: torch.dtype
    nbytes: int
    held: Callable[[], Tensor]
    cast: bool
    is_given: bool


@torch.no_grad()
def export_safetensors(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    dtype: torch.dtype | None = None,
    convention: Convention | None = None,
) -> None:
    """Writes parameters and persistent buffers, but no histories of scaling; rank 0 writes, every rank calls it.

    Args:
        model: sharded or not; every rank holds a part of every parameter.
        directory: of the files; made where it is not there. Files of an earlier export, `model.safetensors` and
            numbered ones, are replaced or removed.
        optimizer: takes values from its masters, where it has them; otherwise from what quantized weights keep of the
            values that were quantized (`preserve_high_precision_init_val`); others are dequantized. Weights that were
            written otherwise since its last step are taken as they are.
        dtype: of floating-point tensors in the files, float64, float32, bfloat16 or float16; their own by default.
        convention: store the bytes of quantized weights by it (`te_dist.conventions.FP8_BLOCK`) instead of values; of
            groups of matrices one by one, `weight` as `weight0`, `weight1` and so on.

    Raises:
        CheckpointError: something cannot be exported so; on every rank alike.
    """
    ranks, where = Ranks.all(), Path(directory)
    kept = _kept(model, ranks)
    entries = ranks.together(lambda: list(_entries(model, optimizer, dtype, convention, kept)))
    _check_alike(model, entries, ranks, f"export to {where}")
    files = _files(entries)
    ranks.together(lambda: where.mkdir(parents=True, exist_ok=True))
    for name, members in files.items():
        tensors = {entry.key: _whole(entry, ranks) for entry in members}
        ranks.together(lambda n=name, t=tensors: weight_files.write(where / n, t) if ranks.rank == 0 else None)
    keys = {name: [entry.key for entry in members] for name, members in files.items()}
    nbytes = sum(entry.nbytes for entry in entries)
    ranks.together(lambda: weight_files.finish(where, keys, nbytes) if ranks.rank == 0 else None)


@torch.no_grad()
def high_precision_state_dict(
    model: nn.Module, *, optimizer: Optimizer | None = None, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Whole parameters and persistent buffers as plain tensors, for programs that know no quantized ones.

    Args: as of `export_safetensors`.

    Returns:
        By the model's names, tied parameters under each of theirs: on the CPU of rank 0. Empty on other ranks.

    Raises:
        CheckpointError: something cannot be given so; on every rank alike.
    """
    ranks = Ranks.all()
    kept = _kept(model, ranks)
    entries = ranks.together(lambda: list(_entries(model, optimizer, dtype, None, kept)))
    _check_alike(model, entries, ranks, "give a whole state")
    # NOTE: on every rank, since FSDP1 gathers what it gives.
    named = _values(model, model_state.named_tensors(model, to_load=False))
    wholes = {entry.key: _whole(entry, ranks) for entry in entries}
    if ranks.rank:
        return {}
    first = _first_names(named)
    return {name: wholes[first[id(tensor)]] for name, tensor in named.items()}


def _check_alike(model: nn.Module, entries: list[_Entry], ranks: Ranks, what: str) -> None:
    if ranks.differ([entry.key for entry in entries]):
        raise CheckpointError(f"cannot {what}: ranks hold different parameters; every rank must have them all")
    replicas.check(model_state.named_tensors(model, to_load=False), ranks)


@torch.no_grad()
def import_safetensors(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Fills a model from high-precision safetensors; quantized weights end as the whole quantized at once, then cut.

    Args:
        model: sharded or not, not on the meta device.
        directory: of `.safetensors` files, each tensor whole, under the names the model has; of those its index names,
            where it has one. Weights take float64, float32, bfloat16 and float16; those of experts may be packed in the
            files and separate in the model, or the other way round. What modules of TransformerEngine pickled beside
            their weights is passed over.

    Raises:
        CheckpointError: names, shapes or dtypes do not fit, files and index are not of one export, or a file cannot be
            read; on every rank alike, before any change.
    """
    ranks, where = Ranks.all(), Path(directory)
    named, places, packing = ranks.together(lambda: _matched(model, where))

    def read(key: str, index: int | None) -> Tensor:
        with safe_open(places[key], framework="pt") as file:
            return file.get_tensor(key) if index is None else file.get_slice(key)[index]

    def fill() -> None:
        for name, tensor in named.items():
            conversion.fill(tensor, packing.read(name, ("", ""), read))

    problems = (
        agreement.of_ties(
            dict.fromkeys((first, name), [("", "")]), packing, read, dtype=conversion.dtype_of(named[first])
        )
        for name, first in model_state.ties(named).items()
    )
    ranks.together(lambda: agreement.check(list(chain.from_iterable(problems)), where))
    ranks.together(fill)


def _kept(model: nn.Module, ranks: Ranks) -> set[str]:
    """Names of weights that are given as the values they were quantized from. Collective."""
    return initial.known_everywhere(ranks.together(lambda: model_state.named_tensors(model, to_load=False)), ranks)


def _entries(
    model: nn.Module,
    optimizer: Optimizer | None,
    dtype: torch.dtype | None,
    convention: Convention | None,
    kept: set[str],
) -> Iterator[_Entry]:
    if convention is not None and not isinstance(convention, Convention):
        raise CheckpointError(f"convention: got {convention!r}, wanted a Convention of te_dist.conventions")
    if dtype is not None and dtype not in model_state.HIGH_PRECISION:
        raise CheckpointError(
            f"dtype: got {dtype}, wanted one of {model_state.dtype_names(model_state.HIGH_PRECISION)}, since codes of "
            "others would have no scales; export_safetensors(convention=...) writes quantized weights with theirs"
        )
    named = _untied(_values(model, model_state.named_tensors(model, to_load=False)))
    model_state.check_quantized(named)
    model_state.check_settled(named)
    if convention is not None and not any(isinstance(local_tensor(t), QuantizedTensor) for t in named.values()):
        raise CheckpointError(
            "convention: got a model without quantized weights, wanted some to store by it; make them so "
            "(te_dist.convert, te_dist.quantized_model_init), or leave out convention= to export values"
        )
    optimizer = optimizer_state.unwrapped(optimizer)
    masters = {} if optimizer is None else _masters(optimizer, named)
    for name, tensor in named.items():
        local, master = local_tensor(tensor), masters.get(name)
        if convention is not None and isinstance(local, QuantizedTensor):
            yield from _by_convention(name, tensor, convention)
            continue
        values = tensor.detach() if master is None else master
        wanted = tensor.dtype if dtype is None or not tensor.dtype.is_floating_point else dtype
        held = functools.partial(_placed, values, keeps=master is None and name in kept)
        nbytes = tensor.numel() * wanted.itemsize
        yield _Entry(name, wanted, nbytes, held, cast=True, is_given=_is_given(values))


def _values(model: nn.Module, named: Named) -> Named:
    """Without histories of delayed scaling, which no other program knows and the first steps make anew."""
    histories = model_state.histories(model)
    return {name: tensor for name, tensor in named.items() if id(tensor) not in histories}


def _masters(optimizer: Optimizer, named: Named) -> Named:
    """By parameter, its master; with the values that the parameter holds by now, where it was written otherwise."""
    states = optimizer_state.tensors(optimizer, named)
    return {n: state[optimizer_state.MASTER] for n, state in states.items() if optimizer_state.MASTER in state}


def _by_convention(name: str, tensor: Tensor, convention: Convention) -> Iterator[_Entry]:
    storage, whole = local_tensor(tensor).storage, model_state.whole_region(tensor)
    rowwise = storage.format.rowwise
    if rowwise is None or not convention.accepts(rowwise):
        raise CheckpointError(
            f"{name} is {model_state.format_name(model_state.describe(tensor))}, wanted the format of the convention; "
            "save a checkpoint with masters, load it into a model of that format, and export this"
        )
    is_group = isinstance(storage, GroupedStorage)
    if tensor.dim() != 2 and not is_group:  # noqa: PLR2004
        raise CheckpointError(
            f"{name} has shape {tuple(tensor.shape)}, wanted a matrix: a stack has no place in the convention; "
            "export it in high precision"
        )
    for index in range(tensor.shape[0]) if is_group else [None]:
        for field in rowwise.fields:
            part = Part.of_field if index is None else functools.partial(_member, tensor, index)
            key = name + ("" if index is None else str(index)) + convention.suffixes[field.name]
            dtype = convention.dtypes.get(field.name) or field.dtype
            held = functools.partial(part, field, storage, whole)
            yield _Entry(key, dtype, field.compact_bytes(whole), held, cast=False, is_given=_is_given(tensor))


def _member(tensor: Tensor, index: int, field: Field, storage: GroupedStorage, whole: Region) -> Part:
    """What this rank has of one member of a group: nothing, where others have it."""
    first = first_member(tensor)
    members = Part.of_members(field, storage, whole, place=(first, tensor.shape[0]))
    here = members.held[index - first : index - first + 1] if first <= index else members.held[:0]
    held = here[0] if len(here) else members.held.new_empty((0,) * (members.dim() - 1))
    return Part(tuple(members.shape[1:]), held, offset=members.offset[1:], skipped=(0,) * held.dim())


def _placed(tensor: Tensor, *, keeps: bool) -> Tensor:
    """What this rank holds, in high precision: a Part of a sharded tensor, or all of one that is not.

    `keeps`: whether all ranks know what their parts were quantized from, which is taken then.
    """
    local = local_tensor(tensor)
    values = local
    if isinstance(local, QuantizedTensor):
        known = initial.values(local) if keeps else None
        dtype = torch.float32 if keeps else None  # alike on all ranks, also on those without rows
        values = local.decoded(dtype) if known is None else known
    return Part.placed_as(tensor, values) if isinstance(tensor, DTensor) else values


def _whole(entry: _Entry, ranks: Ranks) -> Tensor:
    """The whole tensor of an entry, on the CPU of rank 0; elsewhere nothing of use. Collective for a Part.

    It has memory of its own, whatever shares that of the model.
    """
    source = entry.held()
    is_own = isinstance(source, Part)
    if isinstance(source, Part):
        source = source.as_whole(is_given=entry.is_given)
        if ranks.group is not None and source.numel():
            # NOTE: one rank gives a value, all others zero: the largest byte is the value's.
            dist.reduce(source.view(-1).view(torch.uint8), 0, dist.ReduceOp.MAX, group=ranks.group)
    found = source.to(entry.dtype) if entry.cast else source.contiguous().view(entry.dtype)
    return found.to("cpu", copy=not is_own).contiguous()


def _is_given(tensor: Tensor) -> bool:
    """Whether this rank has the first copy of its part of a tensor, on the mesh that has the first rank."""
    return not isinstance(tensor, DTensor) or (has_first_copy(tensor) and 0 in tensor.device_mesh.mesh)


def _untied(named: Named) -> Named:
    """Tied parameters once, under their first name."""
    first = _first_names(named)
    return {name: tensor for name, tensor in named.items() if first[id(tensor)] == name}


def _first_names(named: Named) -> dict[int, str]:
    return {id(tensor): name for name, tensor in reversed(named.items())}


def _files(entries: list[_Entry]) -> dict[str, list[_Entry]]:
    """Entries by file name."""
    files: list[list[_Entry]] = [[]]
    for entry in entries:
        if files[-1] and sum(e.nbytes for e in files[-1]) + entry.nbytes > FILE_BYTES:
            files.append([])
        files[-1].append(entry)
    return {weight_files.name_of(i, len(files)): file for i, file in enumerate(files)}


def _stored(where: Path, named: Named, every: Named) -> dict[str, weight_files.Stored]:
    """What is to be read, without histories of this model (in `every` alone) and extra states of others."""
    contents = weight_files.contents(where)
    extra = [name for name in contents if name not in named and foreign.names_extra_state(name)]
    passed_over = {*every, *extra}
    foreign.warn_unless(all(0 in contents[name].shape for name in extra))
    return {name: each for name, each in contents.items() if name in named or name not in passed_over}


def _matched(model: nn.Module, where: Path) -> tuple[Named, dict[str, Path], Packing]:
    """(Tensors of the model that are filled, file of each stored one, how their names differ)."""
    every = model_state.named_tensors(model)
    named = _values(model, every)
    model_state.check_quantized(named)
    stored = _stored(where, named, every)
    scales = [name for name in stored if name not in named and names_a_scale(name)]
    if scales:
        raise CheckpointError(
            f"cannot import {where}: got codes with scales ({scales[0]}), an export for inference, wanted "
            "high-precision weights; import what export_safetensors writes without convention="
        )
    described = {name: {"shape": each.shape} for name, each in stored.items()}
    packing = Packing.of(named, described)
    targets = {name: packing.targets_of(name, named) for name in stored}
    filled = {target: named[target] for wanted in targets.values() for target in wanted}
    found = {id(tensor) for tensor in filled.values()}  # of a tied one under either of its names
    problems = [f"{name} is in no file" for tensor, name in _first_names(named).items() if tensor not in found]
    for name, (path, shape, dtype) in stored.items():
        if not targets[name]:
            problems.append(f"{name} is in {path.name} only")
            continue
        target, wanted = next(iter(targets[name].items()))
        if shape != wanted:
            problems.append(f"{name} has shape {shape}, wanted {wanted}")
        problems += model_state.dtype_problems(name, dtype, named[target])
    if problems:
        problems = Packing.miscounted(named, described) + problems
        raise CheckpointError(
            f"cannot import {where}: {listed(problems)}; rename, reshape or convert what is in the files"
        )
    return filled, {name: each.path for name, each in stored.items()}, packing
