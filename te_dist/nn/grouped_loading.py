"""State dicts that have one tensor of all groups where a module has one for each, or the other way round."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from te_dist.grouped import GroupedTensor
from te_dist.nn.grouped_weights import together
from te_dist.tensor import QuantizedTensor
from te_dist.tensor.placement import local_tensor


def take_either(
    state_dict: MutableMapping[str, Any], prefix: str, what: str, *, names: Sequence[str], each: Sequence[str]
) -> str | None:
    """Puts what a module takes into `state_dict`, where that has the same values of the other kind.

    Args:
        prefix: of the module's keys.
        what: "weight" or "bias", the name of one tensor of all groups.
        names: of the parameters that the module has: (`what`,), or `each`.
        each: of one tensor for each group.

    Returns:
        Why it does not, where the values are there and cannot be exchanged.
    """
    one, all_of_them = [prefix + what], [prefix + name for name in each]
    takes_one = tuple(names) == (what,)
    wanted, given = (one, all_of_them) if takes_one else (all_of_them, one)
    values: list[Any] = [state_dict.get(key) for key in given]
    if any(key in state_dict for key in wanted) or not all(isinstance(value, Tensor) for value in values):
        return None
    if not takes_one and values[0].shape[:1] != (len(wanted),):
        return f"{given[0]}: got shape {tuple(values[0].shape)}, wanted {len(wanted)} groups in front"
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        return (
            f"{given[0]} to {given[-1]}: got shapes {sorted(shapes)}, wanted one for all: {wanted[0]} has them together"
        )
    if any(isinstance(value, DTensor) and _cannot_be_exchanged(value, takes_one) for value in values):
        has, takes = ("one group", "all") if takes_one else ("all groups", "one")
        return (
            f"{given[0]}: got the part of a sharded tensor of {has} where {wanted[0]} is of {takes}: values lie on "
            "other ranks, or in other tiles; load by te_dist.checkpoints.load or import_safetensors, which exchange "
            f"them, or make the module with single_grouped_{what}={not takes_one}"
        )
    for key in given:
        del state_dict[key]
    made = [_in_one(values)] if takes_one else _apart(values[0])
    state_dict.update(zip(wanted, made, strict=True))
    return None


def _cannot_be_exchanged(value: DTensor, takes_one: bool) -> bool:
    """Whether it is quantized, so that torch would decode it on the way, or cut where it would be taken apart."""
    is_cut = not takes_one and any(placement.is_shard(0) for placement in value.placements)
    return is_cut or isinstance(local_tensor(value), QuantizedTensor)


def _in_one(values: list[Any]) -> Tensor:
    """One tensor of all groups, with the values at initialization where all have kept them."""
    whole = together(values, dims=values[0].dim() + 1)
    if isinstance(whole, GroupedTensor):
        kept = [value.storage.initial for value in values]
        if all(initial is not None for initial in kept):
            whole.storage.initial = torch.stack(kept).view(whole.storage.shape)
    return whole


def _apart(whole: Any) -> list[Tensor]:
    """One tensor for each group, likewise."""
    values = list(whole.unbind())
    if isinstance(whole, GroupedTensor) and whole.storage.initial is not None:
        for value, initial in zip(values, whole.storage.initial.view(whole.shape), strict=True):
            value.storage.initial = initial.clone()
    return values
