"""What `load_state_dict` does beyond copying: values that are assigned to quantized parameters are quantized first.

torch's `assign=True` puts the tensors of a state dict in the place of parameters. Plain values would leave a module
with a plain weight, and a shard without the hooks by which it is gathered. And an optimizer has the parameters of
before: that they were exchanged is noted, so that its step can be refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from te_dist import _torch_private
from te_dist.fsdp2.parameter import ShardedParameter
from te_dist.fsdp2.unsharded import Unsharded
from te_dist.tensor import QuantizedTensor
from te_dist.tensor.exchanged import note_exchanged
from te_dist.tensor.placement import local_tensor

ASSIGNS = "assign_to_params_buffers"  # torch's key in the metadata that it hands to a module
_BY = "load_state_dict(assign=True)"  # what exchanges parameters for those that are assigned


def watch(module: nn.Module) -> None:
    """Has torch call `quantize_assigned` where `module` is loaded so."""
    module.register_load_state_dict_pre_hook(_before)


def _before(
    module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    if metadata.get(ASSIGNS, False):
        quantize_assigned(module, state_dict, prefix)


@torch.no_grad()
def quantize_assigned(module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str) -> None:
    """Before torch assigns: parameters of their kind in the place of values for the quantized ones of `module`.

    They have the dtype and the device of the values, as torch has it of plain ones, and the format of the parameter.
    What becomes of parameters, plain ones too, is noted for optimizers that hold them.

    Raises:
        ValueError: values of another dtype than fp32, bf16 and fp16, or placed otherwise than the parameter is.
    """
    made = {key: _of_its_kind(param, value, key) for key, param, value in _pairs(module, state_dict, prefix)}
    state_dict.update(made)
    _note_assigned(module, state_dict, prefix)


def _note_assigned(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Parameters that others are about to take the place of."""
    if torch.__future__.get_swap_module_params_on_conversion():
        return  # torch then leaves the objects in their place, and exchanges what is in them
    for name, found in module.named_parameters(recurse=False):
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and value is not found and value.shape == found.shape:
            note_exchanged(_held_by_optimizers(found), prefix + name, _BY)


def _held_by_optimizers(found: nn.Parameter) -> Tensor:
    """The shard, where a parameter was gathered: FSDP2 puts it back before it loads, but later than this is asked."""
    # NOTE: to ask for a shard looks through all that FSDP2 manages, and most parameters are shards: DTensors.
    local = local_tensor(found)
    gathered = isinstance(local, ShardedParameter) and isinstance(local.storage, Unsharded)
    shard = _torch_private.sharded_of(found) if gathered or not isinstance(found, DTensor) else None
    return found if shard is None else shard


def _pairs(
    module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str
) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """(key, parameter, value of its shape) of the quantized parameters of `module` that have one."""
    for name, found in module.named_parameters(recurse=False):
        value, local = state_dict.get(prefix + name), local_tensor(found)
        if not isinstance(local, ShardedParameter) or not isinstance(value, Tensor):
            continue
        # What FSDP2 has gathered it puts back before it loads, but later than this is asked.
        gathered = isinstance(local.storage, Unsharded)
        param: Any = _torch_private.sharded_of(found) if gathered else found
        if param is not None and value.shape == param.shape:  # torch tells of the others
            yield prefix + name, param, value


def _of_its_kind(param: Any, value: Any, key: str) -> nn.Parameter:
    """A parameter that is quantized and placed as `param` is, of what `value` holds."""
    wanted, got = (tuple(t.placements) if isinstance(t, DTensor) else None for t in (param, value))
    if wanted != got:
        raise ValueError(
            f"{key}: assigned is {_placed(got)}, the quantized parameter is {_placed(wanted)}; pass values that are "
            "placed as it is (torch.distributed.tensor.distribute_tensor), or load by set_model_state_dict"
        )
    local, given = local_tensor(param), local_tensor(value).detach()
    if _is_such(given, local):
        made = local.like(given.storage, local.shape)
    else:
        made = torch.empty_like(local, dtype=given.dtype, device=given.device)
        if not given.is_meta:
            made.copy_(given)
    if isinstance(param, DTensor):
        made = _torch_private.sharded_like(param, made)
    return nn.Parameter(made, requires_grad=param.requires_grad)


def _is_such(given: Tensor, local: ShardedParameter) -> bool:
    """Whether what is given holds the same part of a matrix in the same format, so that it can be taken as it is."""
    if not isinstance(given, QuantizedTensor) or given.storage.matrix_dim != local.storage.matrix_dim:
        return False
    a, b = given.storage, local.storage
    return (a.format, a.place, a.cut, a.cut_dims) == (b.format, b.place, b.cut, b.cut_dims)


def _placed(placements: tuple[Any, ...] | None) -> str:
    return "no DTensor" if placements is None else f"a DTensor of {list(placements)}"
