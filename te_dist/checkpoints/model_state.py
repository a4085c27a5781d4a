"""The parameters and buffers of a model: their names, what a manifest says of them, what DCP is handed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from te_dist._torch_private import given_name
from te_dist.checkpoints.errors import CheckpointError, listed
from te_dist.checkpoints.part import Part
from te_dist.formats import Format, Region
from te_dist.grouped import GroupedStorage, GroupedTensor, first_member
from te_dist.scaling.delayed import DelayedScalingState
from te_dist.tensor import QuantizedStorage, QuantizedTensor
from te_dist.tensor.placement import local_tensor

HIGH_PRECISION = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def named_tensors(model: nn.Module, *, to_load: bool = True) -> dict[str, Tensor]:
    """Parameters and persistent buffers, the objects themselves, by the names the author of the model gave them.

    Args:
        to_load: whether they are to be filled, at once or from what is saved now; otherwise copies of them will do.

    Raises:
        CheckpointError: `model` is no module, one keeps state that is neither, in which a load would be lost, two have
            one name, or a tensor is nowhere yet (meta).
    """
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"model: got {type(model).__name__}, wanted the torch.nn.Module itself")
    if isinstance(model, DistributedDataParallel):
        model = model.module
    # NOTE: FSDP2 reshards in a hook of `state_dict`; `named_parameters` would show unsharded parameters.
    state = model.state_dict(keep_vars=True)
    named = {given_name(name): value for name, value in state.items()}
    if len(named) != len(state):
        count = Counter(map(given_name, state))
        twice = [name for name in state if count[given_name(name)] > 1]
        raise CheckpointError(f"names that are those of others, but for wrappers: {listed(twice)}; rename one of each")
    places = {_memory(tensor) for tensor in chain(model.parameters(), model.buffers())}
    other = [
        f"{name} ({type(value).__name__})"
        for name, value in named.items()
        if not isinstance(value, Tensor) or (to_load and local_tensor(value).numel() and _memory(value) not in places)
    ]
    if other:
        raise CheckpointError(
            f"state of modules that is no parameter or buffer: {listed(other)}; what `get_extra_state`, hooks "
            "of `state_dict` or an override make would not be loaded: hand it over as `extra`, or register a buffer"
        )
    meta = [name for name, value in named.items() if value.is_meta]
    if meta:
        raise CheckpointError(f"tensors on the meta device: {listed(meta)}; call fsdp2.materialize or to_empty first")
    return {name: value for name, value in named.items() if _is_here(value)}


def _memory(tensor: Tensor) -> Any:
    """Equal for tensors in one memory; of those whose memory nobody knows, the tensor itself."""
    held = _held(tensor)
    return id(tensor) if held is None else (held.device, held.untyped_storage().data_ptr())


def _held(tensor: Tensor) -> Tensor | None:
    """What this rank has of a tensor, of a quantized one its first field; None where that has no memory known to us."""
    local = local_tensor(tensor)
    if isinstance(local, QuantizedTensor):
        local = next(iter(local.storage.buffers.values()), local)
    has_memory = type(local) is Tensor or issubclass(type(local), nn.Parameter)  # others hold theirs in parts
    is_plain = has_memory and not local.is_meta and local.layout == torch.strided
    return local if is_plain and local.numel() else None


def ties(named: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of tensors, or of the same elements of one memory, that have others before them: the first one of each."""
    first: dict[Any, str] = {}
    return {
        name: found for name, tensor in named.items() if (found := first.setdefault(_elements(tensor), name)) != name
    }


def _elements(tensor: Tensor) -> Any:
    """Equal for tensors that are filled together."""
    held = _held(tensor)
    if held is None:
        return id(tensor)
    return _memory(tensor), held.storage_offset(), held.shape, held.stride(), tensor.shape


def _is_here(tensor: Tensor) -> bool:
    """Whether this rank belongs to the mesh of the tensor."""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def describe(tensor: Tensor) -> dict[str, Any]:
    """What a manifest says of a whole tensor; equal on all ranks."""
    described: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype)[6:]}
    local = local_tensor(tensor)
    if isinstance(local, QuantizedTensor):
        described["format"] = describe_format(local.format)
        if isinstance(local, GroupedTensor):
            described["members"] = tensor.shape[0]
    return described


def describe_format(format: Format) -> dict[str, Any]:
    """The canonical part of a format: what must be equal for the bytes of one tensor to be those of another.

    Padding is left out: it is not saved.
    """
    format = format.canonical
    return {
        direction.value: {
            "codec": repr(format[direction].codec),
            "fields": {
                f.name: f"{str(f.dtype)[6:]}, grain {f.grain}, tile {f.tile}, {f.order}, pack {f.pack}"
                for f in format[direction].fields
            },
        }
        for direction in format.directions
    }


def format_name(described: dict[str, Any]) -> str:
    """A format, or the dtype of a plain tensor, in a message."""
    if "format" not in described:
        return described["dtype"]
    return " and ".join(f"{direction} {each['codec']}" for direction, each in described["format"].items())


def dtype_problems(name: str, dtype: torch.dtype, tensor: Tensor) -> list[str]:
    """Why plain values of `dtype` are none for a tensor of another type; empty where they are.

    What is floating-point or quantized takes high precision only: codes whose scales nobody knows, and whole numbers,
    would be taken for values. Others, which might be cut off, take their own.
    """
    is_quantized = isinstance(local_tensor(tensor), QuantizedTensor)
    takes_values = is_quantized or tensor.dtype.is_floating_point
    widens = tensor.dtype.is_complex and dtype.is_floating_point and torch.can_cast(dtype, tensor.dtype)
    if (takes_values and dtype in HIGH_PRECISION) or (dtype == tensor.dtype and not is_quantized) or widens:
        return []
    wanted = f"one of {dtype_names(HIGH_PRECISION)}" if takes_values else dtype_names([tensor.dtype])
    return [f"{name} has dtype {str(dtype)[6:]}, wanted {wanted}"]


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    """In a message."""
    return ", ".join(str(each)[6:] for each in dtypes)


def histories(model: nn.Module) -> set[int]:
    """`id` of the buffers that are histories of delayed scaling."""
    return {id(b) for m in model.modules() if isinstance(m, DelayedScalingState) for b in m.buffers()}


def parts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """What DCP writes and reads for one tensor, by key; reading fills the tensor in place.

    A plain tensor keeps its name. The fields of a quantized one become siblings of it: `layer.weight_row_data`. They
    are no children, `layer.weight.row_data`, because torch's helpers would look for an attribute of the weight.
    """
    local = local_tensor(tensor)
    if not isinstance(local, QuantizedTensor):
        return {name: tensor.detach()}
    whole = whole_region(tensor)
    if isinstance(local, GroupedTensor):
        place = (first_member(tensor), tensor.shape[0])
        made = {f.name: Part.of_members(f, local.storage, whole, place=place) for f in local.format.canonical.fields}
    else:
        made = {f.name: Part.of_field(f, local.storage, whole) for f in local.format.canonical.fields}
    return {f"{name}_{field}": part for field, part in made.items()}


def all_parts(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """`parts` of every tensor.

    Raises:
        CheckpointError: a field of one tensor would have the name of another tensor.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in named.items():
        own = parts(name, tensor)
        taken = [key for key in own if key in found or (key in named and key != name)]
        if taken:
            raise CheckpointError(f"{name} would be saved as {taken[0]}, which is the name of another; rename that one")
        found |= own
    return found


def whole_region(tensor: Tensor) -> Region:
    """The matrix behind a quantized tensor, or each of those of a group, before any cut."""
    if isinstance(local_tensor(tensor), GroupedTensor):
        return Region.whole(*tensor.shape[1:])
    cols = tensor.shape[-1]
    return Region.whole(tensor.numel() // cols if cols else 0, cols)


def check_quantized(named: dict[str, Tensor]) -> None:
    """Raises CheckpointError where the bytes of a shard are not, or cannot be placed as, those of the whole."""
    problems: list[str] = []
    for name, tensor in named.items():
        local = local_tensor(tensor)
        if isinstance(local, QuantizedTensor):
            problems += [f"{name} {problem}" for problem in _misplaced(tensor, local.storage)]
    if problems:
        raise CheckpointError(listed(problems))


def check_settled(named: dict[str, Tensor]) -> None:
    """Raises CheckpointError where shards of one tensor have not agreed on the scales they share."""
    unsettled = [name for name, storage in _storages(named) if storage.unsettled is not None]
    if unsettled:
        raise CheckpointError(
            f"{listed(unsettled)}: high-precision values were written into shards, each by its own scales; "
            "call fsdp2.settle(model) before saving, so that all shards share those of the whole"
        )


def finish_reading(named: dict[str, Tensor]) -> None:
    """Rebuilds what is derived from the bytes that were read, and forgets the values these replace."""
    for _, storage in _storages(named):
        storage.copy_(storage.select(*storage.format.canonical.directions))
    # NOTE: torch reads into what it detached, and counts no write into the parameter.
    torch.autograd.graph.increment_version(local_tensor(tensor) for tensor in named.values())


def _storages(named: dict[str, Tensor]) -> Iterable[tuple[str, QuantizedStorage]]:
    for name, tensor in named.items():
        local = local_tensor(tensor)
        if isinstance(local, QuantizedTensor):
            yield name, local.storage


def _misplaced(tensor: Tensor, storage: QuantizedStorage) -> list[str]:
    """What is wrong with a shard: fields that are not there, or a region other than the mesh says."""
    if storage.missing:
        return [
            f"has no {', '.join(storage.missing)}, got {list(storage.buffers)}; call update_usage(rowwise_usage=True)"
        ]
    wanted = whole_region(tensor)
    if isinstance(tensor, DTensor) and all(storage.shape):
        (chunk,) = tensor.__create_chunk_list__()
        rows, cols = storage.region.shape
        if isinstance(storage, GroupedStorage):
            origin = chunk.offsets[1:]
        else:
            unit = wanted.shape[0] // tensor.shape[0] if tensor.dim() > 1 else 1
            origin = (chunk.offsets[0] * unit, chunk.offsets[-1]) if tensor.dim() > 1 else (0, chunk.offsets[0])
        wanted = wanted.narrow(0, origin[0], rows).narrow(1, origin[1], cols)
    if wanted != storage.region and all(storage.shape):
        return [f"is said to be {storage.region}, but by shape and mesh it is {wanted}; cut it from the whole tensor"]
    return []
