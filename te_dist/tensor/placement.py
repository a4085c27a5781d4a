"""Where the parts of a DTensor lie: which rows and columns of the whole every rank holds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from te_dist.formats import Partition, Region, Span
from te_dist.tensor.untyped import TENSOR


def local_tensor(param: Any) -> Any:
    """What this rank holds of a parameter, without an autograd edge."""
    return param._local_tensor if isinstance(param, DTensor) else param  # pyright: ignore[reportPrivateUsage]


def cuts(placements: Sequence[Placement]) -> tuple[tuple[int, int], ...]:
    """(mesh dimension, tensor dimension) of every cut, outermost first.

    FSDP2 cuts what tensor parallelism left on a rank, and marks this by a strided placement: plain ones come first.
    """
    dims: list[Any] = [getattr(placement, "dim", None) for placement in placements]
    cut = [index for index, dim in enumerate(dims) if dim is not None]
    return tuple((index, dims[index]) for index in sorted(cut, key=lambda index: type(placements[index]) is not Shard))


def local_part(whole: Tensor, like: DTensor) -> Tensor:
    """The part of a plain tensor that this rank holds of `like`: a view."""
    mesh = like.device_mesh
    for mesh_dim, dim in cuts(like.placements):
        chunks = torch.chunk(whole, mesh.size(mesh_dim), dim)
        rank = mesh.get_local_rank(mesh_dim)
        whole = chunks[rank] if rank < len(chunks) else whole.narrow(dim, whole.shape[dim], 0)
    return whole


def shape_everywhere(param: DTensor) -> tuple[int, ...] | None:
    """Shape of the part that every rank holds; None where some hold less than others."""
    shape = list(param.shape)
    for mesh_dim, dim in cuts(param.placements):
        shape[dim], rest = divmod(shape[dim], param.device_mesh.size(mesh_dim))
        if rest:
            return None
    return tuple(shape)


def local_start(param: DTensor) -> tuple[int, ...]:
    """Index in the whole, in every dimension, of the first element that this rank holds."""
    mesh, start, size = param.device_mesh, [0] * param.dim(), list(param.shape)
    for mesh_dim, dim in cuts(param.placements):
        length = -(-size[dim] // mesh.size(mesh_dim))
        begin = min(length * mesh.get_local_rank(mesh_dim), size[dim])
        start[dim] += begin
        size[dim] = min(length, size[dim] - begin)
    return tuple(start)


def has_first_copy(param: DTensor) -> bool:
    """Whether this rank's part is the first of those that are copies of each other; several meshes have one each."""
    mesh = param.device_mesh
    uncut = set(range(mesh.ndim)) - {mesh_dim for mesh_dim, _ in cuts(param.placements)}
    return all(mesh.get_local_rank(mesh_dim) == 0 for mesh_dim in uncut)


def matrix_cuts(param: DTensor) -> tuple[tuple[int, int], ...]:
    """`cuts`, without those between whole members of a group."""
    return tuple(cut for cut in cuts(param.placements) if cut[1] % param.dim() >= _matrix_dim(param))


def partition(param: DTensor) -> Partition:
    """How all ranks together cut the matrix behind `param`, or each of those of a group."""
    first = _matrix_dim(param)
    cuts = tuple((param.device_mesh.size(i), dim % param.dim() - first) for i, dim in matrix_cuts(param))
    return _partition(param.shape[first:], cuts)


@functools.lru_cache(maxsize=1024)
def _partition(shape: torch.Size, cuts: tuple[tuple[int, int], ...]) -> Partition:
    """Of a matrix of this nominal shape; `cuts`: (number of parts, dimension)."""
    unit = shape[:-1].numel() // shape[0] if shape[0] else 1
    regions = [Region(Span(0, shape[0] * unit), Span(0, shape[-1]))]
    for size, dim in cuts:
        regions = [part for region in regions for part in _cut(region, dim, size, unit, len(shape))]
    return Partition.of(regions)


def groups(param: DTensor) -> tuple[dist.ProcessGroup, ...]:
    """Process groups over which the parts of a matrix are spread."""
    return tuple(param.device_mesh.get_group(mesh_dim) for mesh_dim, _ in matrix_cuts(param))


def group_key(param: DTensor) -> tuple[object, ...]:
    """Equal for parameters the parts of whose matrices are spread over the same groups."""
    return (param.device_mesh, tuple(mesh_dim for mesh_dim, _ in matrix_cuts(param)))


def _matrix_dim(param: DTensor) -> int:
    return getattr(getattr(local_tensor(param), "storage", None), "matrix_dim", 0)


def _cut(region: Region, dim: int, size: int, unit: int, num_dims: int) -> Sequence[Region]:
    if dim == 0:
        return region.chunk(size, unit)
    if dim != num_dims - 1:
        raise NotImplementedError(
            f"a quantized parameter is cut along its first or last dimension, got dim {dim} of {num_dims}"
        )
    flipped = Region(region.cols, region.rows).chunk(size)
    return tuple(Region(part.cols, part.rows) for part in flipped)


def spread(tensor: Tensor) -> tuple[tuple[Placement, tuple[int, ...]], ...]:
    """How a tensor is cut, as far as this rank can tell: of each mesh dimension over which it is, its placement and the
    ranks that hold the parts beside this one's. Empty for copies and plain tensors."""
    if not isinstance(tensor, DTensor):
        return ()
    cut = [(i, placement) for i, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return tuple((placement, _ranks_beside(tensor.device_mesh, mesh_dim)) for mesh_dim, placement in cut)


def is_same_part(tensor: Tensor, param: Tensor, *, whole: torch.Size, own: torch.Size) -> bool:
    """Whether a tensor has this rank's part of what is cut as `param` is; it may come without saying of which whole.

    `whole`, `own`: shapes of all of it and of the part here.
    """
    if local_tensor(tensor).shape != own:
        return False
    is_part = isinstance(param, DTensor) and not isinstance(tensor, DTensor)
    return is_part or (tensor.shape == whole and spread(tensor) == spread(param))


@functools.lru_cache(maxsize=64)
def _ranks_beside(mesh: DeviceMesh, mesh_dim: int) -> tuple[int, ...]:
    """Ranks of the line along a mesh dimension that goes through this one; the first line where the mesh has it not."""
    place = mesh.get_coordinate() or [0] * mesh.ndim
    line = mesh.mesh[tuple(slice(None) if dim == mesh_dim else at for dim, at in enumerate(place))]
    return tuple(TENSOR.tolist(line))
