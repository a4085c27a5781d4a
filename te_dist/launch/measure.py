"""What a rank holds and what it receives, in bytes."""

from __future__ import annotations

import resource

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from te_dist._torch_private import is_traceable_wrapper_subclass
from te_dist.launch.model import PARAMS_DTYPE

KIBIBYTE = 1024  # unit of the operating system's figure
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
UNIT = 1024.0


def size(num_bytes: float) -> str:
    """Bytes for human eyes: 1536 is "1.5 KiB"."""
    for unit in UNITS[:-1]:
        if num_bytes < UNIT:
            return f"{num_bytes:.0f} {unit}" if unit == UNITS[0] else f"{num_bytes:.1f} {unit}"
        num_bytes /= UNIT
    return f"{num_bytes:.1f} {UNITS[-1]}"


def num_parameters(model: nn.Module) -> int:
    """Elements of all parameters over all ranks."""
    return sum(parameter.numel() for parameter in model.parameters())


def held_bytes(model: nn.Module) -> int:
    """Bytes of this rank's part of all parameters, scales and padding included."""
    return sum(_bytes(parameter) for parameter in model.parameters())


def plain_held_bytes(model: nn.Module) -> int:
    """What `held_bytes` would be in bf16."""
    return sum(_local(parameter).numel() for parameter in model.parameters()) * PARAMS_DTYPE.itemsize


def memory_in_use(device: torch.device) -> int:
    """Most bytes in use so far: of the device's allocator, or of the process where the device is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE


def plain_gathered_bytes(model: nn.Module, passes: int) -> int:
    """What one step would gather in bf16: the blocks twice a pass, freed in between, the rest once.

    Args:
        passes: forward and backward passes of a step.
    """
    total = 0
    for name, parameter in model.named_parameters():
        if max(_along(parameter, "dp"), _along(parameter, "edp")) > 1:
            gathers = 2 if name.startswith("blocks.") else 1
            total += gathers * parameter.numel() // (_along(parameter, "tp") * _along(parameter, "ep"))
    return passes * total * PARAMS_DTYPE.itemsize


def _along(parameter: Tensor, axis: str) -> int:
    """Ranks of a mesh axis over which the parameter is cut; 1 where it is not."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    dim = (mesh.mesh_dim_names or ()).index(axis) if axis in (mesh.mesh_dim_names or ()) else None
    return 1 if dim is None or parameter.placements[dim].is_replicate() else mesh.size(dim)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _bytes(tensor: Tensor) -> int:
    local = _local(tensor).detach()
    if not is_traceable_wrapper_subclass(local):
        return local.nbytes
    return sum(_bytes(getattr(local, name)) for name in local.__tensor_flatten__()[0])
