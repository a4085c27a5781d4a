"""Parameters that ranks hold under one name without a DTensor that ties them: one is saved, so they must be copies.

Stages of a pipeline that all count their layers from 0, or experts that every rank keeps as plain tensors, are no
copies: a checkpoint has one place for a name, and would hold parts of one and of the other.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from te_dist.checkpoints import model_state
from te_dist.checkpoints.errors import CheckpointError, Ranks, listed
from te_dist.checkpoints.part import Part
from te_dist.tensor import QuantizedTensor
from te_dist.tensor.placement import local_start, local_tensor

SAMPLES = 20  # of a dimension, at least, where it is as long
NEAR = 0.5  # of their norm: copies that drifted apart are nearer to each other, other weights farther away
DRIFT = 1e-4  # root of the mean square: values that began as 0 may drift so far, and are as far apart as large then


class _Place(NamedTuple):
    """Where something lies in a tensor: the shape of the whole, and first index and shape of what is here."""

    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def crosses(self, other: _Place) -> bool:
        """Whether they share elements but not all of them; tensors of different shapes are not compared."""
        if self == other or self.whole != other.whole:
            return False
        return all(
            min(a + n, b + m) > max(a, b)
            for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )


class _Pair(NamedTuple):
    """Two ranks that have other values at the place of the first one, or cut the tensor elsewhere."""

    name: str
    ranks: tuple[int, int]
    crosses: bool


def check(named: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Compares samples of what ranks hold at the same place, where no mesh has all of them. Collective.

    Copies that drifted apart are warned of by rank 0; one of them is saved.

    Raises:
        CheckpointError: they are no copies; on every rank alike.
    """
    if ranks.size == 1:
        return
    untied = _untied({n: t for n, t in named.items() if isinstance(t, nn.Parameter) and _has_values(t)}, ranks)
    held = {name: named[name] for name in untied if name in named and local_tensor(named[name]).numel()}
    if not untied:
        return
    own = ranks.together(lambda: {name: (_place(tensor), _checksum(name, tensor)) for name, tensor in held.items()})
    pairs = _pairs(ranks.gather(own)) if ranks.differ(own) else []
    if not pairs:
        return
    of_ranks = ranks.gather(ranks.together(lambda: {p.name: _values(held[p.name]) for p in pairs if p.name in held}))
    apart = {pair: 1.0 if pair.crosses else _distance(*(of_ranks[r][pair.name] for r in pair.ranks)) for pair in pairs}
    pairs = [pair for pair in pairs if apart[pair]]  # zeros may have signs
    others = [f"{pair.name} (ranks {pair.ranks[0]} and {pair.ranks[1]})" for pair in pairs if apart[pair] > NEAR]
    if others:
        raise CheckpointError(
            "ranks hold other values under one name, and no DTensor says that these are parts or copies of one tensor: "
            f"{listed(others)}; number layers over all stages of a pipeline, make experts DTensors or give those of "
            "each rank names of their own, and have FSDP2 or DistributedDataParallel keep copies equal"
        )
    if pairs and ranks.rank == 0:
        pair = max(pairs, key=apart.__getitem__)
        warnings.warn(
            f"ranks {pair.ranks[0]} and {pair.ranks[1]} should have copies of {pair.name}, which are apart by "
            f"{apart[pair]:.1e} of their norm ({len(pairs)} parameters differ); what one rank has is written",
            stacklevel=2,
        )


def _has_values(tensor: Tensor) -> bool:
    """Whether it is a weight: whole numbers may be what a rank knows of itself."""
    return tensor.is_floating_point() or tensor.is_complex()


def _untied(params: Mapping[str, Tensor], ranks: Ranks) -> list[str]:
    """Names of plain parameters, and of DTensors that ranks have on meshes of other ranks. Collective."""
    own = {name: _mesh(tensor) for name, tensor in params.items()}
    if not ranks.differ(own):
        return [name for name, mesh in own.items() if mesh is None]
    found: dict[str, set[str | None]] = {}
    for theirs in ranks.gather(own):
        for name, mesh in theirs.items():
            found.setdefault(name, set()).add(mesh)
    return sorted(name for name, meshes in found.items() if None in meshes or len(meshes) > 1)


def _mesh(tensor: Tensor) -> str | None:
    """The ranks of a DTensor, as a text of one length."""
    return _text(tensor.device_mesh) if isinstance(tensor, DTensor) else None


@functools.lru_cache(maxsize=64)
def _text(mesh: DeviceMesh) -> str:
    return hashlib.sha256(repr(mesh.mesh.tolist()).encode()).hexdigest()


def _place(tensor: Tensor) -> _Place:
    start = local_start(tensor) if isinstance(tensor, DTensor) else (0,) * tensor.dim()
    return _Place(tuple(tensor.shape), start, tuple(local_tensor(tensor).shape))


def _checksum(name: str, tensor: Tensor) -> int:
    """CRC-32 of samples of every stored field."""
    crc = 0
    for part in model_state.parts(name, tensor).values():
        values = part.held if isinstance(part, Part) else local_tensor(part)
        crc = zlib.crc32(_sample(values).view(torch.uint8).numpy().tobytes(), crc)
    return crc


def _values(tensor: Tensor) -> Tensor:
    """Samples, decoded."""
    local = local_tensor(tensor)
    values = local.decoded() if isinstance(local, QuantizedTensor) else local.detach()
    return _sample(torch.view_as_real(values) if values.is_complex() else values).float()


def _sample(tensor: Tensor) -> Tensor:
    """Elements spread evenly over every dimension, in a row on the CPU."""
    chosen = tensor[tuple(slice(None, None, max(1, n // SAMPLES) | 1) for n in tensor.shape)]
    return chosen.to("cpu", copy=True).reshape(-1).contiguous()


def _pairs(of_ranks: list[dict[str, tuple[_Place, int]]]) -> list[_Pair]:
    """For each name with other values at one place, the first two ranks that have them."""
    pairs: list[_Pair] = []
    for name in sorted({name for held in of_ranks for name in held}):
        first: dict[_Place, tuple[int, int]] = {}
        for rank, held in enumerate(of_ranks):
            if name not in held:
                continue
            place, checksum = held[name]
            known, same = first.setdefault(place, (rank, checksum))
            crossed = [other for at, (other, _) in first.items() if at.crosses(place)]
            if checksum != same or crossed:
                pairs.append(_Pair(name, (crossed[0] if crossed else known, rank), bool(crossed)))
                break
    return pairs


def _distance(one: Tensor, other: Tensor) -> float:
    """In parts of the larger norm, of what is finite; no more than `NEAR` where all is as small as `DRIFT`."""
    is_finite = one.isfinite() & other.isfinite()
    one, other = one[is_finite], other[is_finite]
    norm = max(float(one.norm()), float(other.norm()))
    distance = float((one - other).norm()) / norm if norm else 0.0
    return min(distance, NEAR) if norm <= DRIFT * one.numel() ** 0.5 else distance
