"""What quantized weights keep of the values they were quantized from, saved and loaded beside their bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from te_dist.checkpoints.errors import Ranks
from te_dist.checkpoints.manifest import Manifest
from te_dist.checkpoints.part import Part
from te_dist.tensor import QuantizedTensor
from te_dist.tensor.placement import local_tensor

SAVED = "initial"  # where the values of a weight lie in a checkpoint, and what its entry in the manifest says of that

Named = dict[str, Tensor]


def values(local: QuantizedTensor) -> Tensor | None:
    """fp32, what a quantized tensor keeps; None where it keeps nothing."""
    initial = local.storage.initial
    return None if initial is None else initial.to(local.device, torch.float32).view(local.shape)


def _keeps(tensor: Tensor) -> bool:
    """Whether this rank knows what its part of a quantized tensor was quantized from; of no part it does."""
    local = local_tensor(tensor)
    return isinstance(local, QuantizedTensor) and (local.storage.initial is not None or not local.numel())


def known_everywhere(named: Named, ranks: Ranks) -> set[str]:
    """Names of quantized weights of which every rank knows what its part was quantized from. Collective."""
    return ranks.have_all({name: _keeps(tensor) for name, tensor in named.items()})


def kept(named: Named, ranks: Ranks) -> Named:
    """By name, fp32 values of the weights that know theirs on all ranks, on the CPU. Collective."""
    known = known_everywhere(named, ranks)
    return {name: _placed(named[name], local_tensor(named[name]).storage.initial) for name in named if name in known}


def to_fill(named: Named, manifest: Manifest, converted: dict[str, Any]) -> Named:
    """By name, blanks for what a checkpoint has of weights whose bytes are read from it; see `install`."""
    wanted = {name: tensor for name, tensor in named.items() if manifest.model.get(name, {}).get(SAVED)}
    return {
        name: _placed(tensor, None)
        for name, tensor in wanted.items()
        if name not in converted and isinstance(local_tensor(tensor), QuantizedTensor)
    }


def install(named: Named, filled: Named) -> None:
    """Has weights keep what `to_fill` asked for, once it is read."""
    for name, found in filled.items():
        local: Any = local_tensor(named[name])
        if local.numel():
            local.storage.note_initial(found.held if isinstance(found, Part) else found)


def _placed(tensor: Tensor, initial: Tensor | None) -> Tensor:
    """What is kept, or a blank, on the CPU, where it is kept: a Part of what is sharded, or all of what is not."""
    shape = local_tensor(tensor).shape
    held = torch.empty(shape, dtype=torch.float32) if initial is None else initial.to("cpu", torch.float32).view(shape)
    return Part.placed_as(tensor, held) if isinstance(tensor, DTensor) else held
