"""Steps that would train nothing, or lose what they train, are refused before they are made.

Optimizers that know nothing of quantization could step on quantized parameters: every op they use is defined on
quantized tensors. But an update is smaller than the distance between two codes, so that most of it would be rounded
away, at every step and without a word. And an optimizer that was made before weights were exchanged for quantized ones,
for shards or for those of a state dict, holds weights that no module has any more; one that was made while FSDP2 had
gathered weights holds those, and what is trained are their shards. Where a backward pass ended by an exception, FSDP2
waits for its end, and gives no gradient to any shard. What an evaluation behind backward left gathered is no reason to
refuse: it is freed, since later passes would go on with the weights of before the step. Plain parameters beside shards
are warned of, once: nothing sums their gradients, unless somebody does it by hand.
"""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from te_dist import _torch_private
from te_dist.optim.masters import is_quantized
from te_dist.tensor.exchanged import exchange_of, is_trained_elsewhere

_stepped: WeakSet[torch.optim.Optimizer] = WeakSet()  # once at least
_never_gathered = WeakTensorKeyDictionary()  # parameters that were asked: to ask looks through all that FSDP2 manages


def install() -> None:
    """Makes every `torch.optim.Optimizer` look at its parameters before it steps."""
    register_optimizer_step_pre_hook(refuse)


def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raises RuntimeError where `optimizer` would update codes, weights that are nobody's, or what is gathered.

    Else frees what FSDP2 has gathered of the shards that are updated.
    """
    params = [(index, param) for index, group in enumerate(optimizer.param_groups) for param in group["params"]]
    every = [param for _, param in params]
    _refuse_exchanged(optimizer, every)
    idle = [param for param in every if param.requires_grad and param.grad is None]
    if idle:
        _refuse_gathered(optimizer, _maybe_gathered(idle, every))
        _refuse_unfinished(optimizer, idle)
    _refuse_codes(optimizer, params)
    _torch_private.free_gathered([p for p in every if p.grad is not None and isinstance(p, DTensor)])
    if optimizer not in _stepped:
        _stepped.add(optimizer)
        _warn_of_forgotten(optimizer, every)


def _refuse_codes(optimizer: torch.optim.Optimizer, params: list[tuple[int, Tensor]]) -> None:
    """Of parameters, by group, that have a gradient and no master."""
    if getattr(optimizer, "writes_quantized_parameters", False):
        return
    for index, param in params:
        if param.grad is not None and is_quantized(param):
            name = type(optimizer).__name__
            raise RuntimeError(
                f"{name} would update a quantized parameter of shape {tuple(param.shape)}, in group {index}, "
                "without a master: steps smaller than the distance of two codes are lost; use te_dist.optim."
                f"MasterWeights(params, lambda params: {name}(params, ...)) or te_dist.optim.FusedAdam. (An "
                "optimizer that rounds codes on purpose sets writes_quantized_parameters = True)"
            )


def _refuse_exchanged(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> None:
    """Not of a weight that is frozen, or has a gradient of another model that still has it."""
    trained = [(param, exchange) for param in params if param.requires_grad and (exchange := exchange_of(param))]
    found = [exchange for param, exchange in trained if not is_trained_elsewhere(param)]
    if found:
        raise RuntimeError(
            f"{type(optimizer).__name__} holds {len(found)} weights that {found[0].by} has exchanged for others, "
            f"{_first([exchange.name for exchange in found])}, and would train none of these; make the optimizer after "
            "the model is converted, sharded and loaded"
        )


def _refuse_gathered(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> None:
    """Of those that may be gathered."""
    found = [(param, *place) for param in params if (place := _gathered_place(param)) is not None]
    if found:
        names = [f"{name} {tuple(param.shape)} of {type(module).__name__}" for param, module, name, _ in found]
        raise RuntimeError(
            f"{type(optimizer).__name__} holds {len(found)} parameters as FSDP2 gathered them for a pass, "
            f"{_first(names)}, and would train nothing of them; wanted their shards: make the optimizer before the "
            "first pass, or call module.reshard() first on units that an evaluation left gathered, as it does the root"
        )


def _refuse_unfinished(optimizer: torch.optim.Optimizer, idle: list[Tensor]) -> None:
    """Of what is to be trained and has no gradient."""
    if _torch_private.waits_for_backward(idle):
        raise RuntimeError(
            f"{type(optimizer).__name__} has no gradients of {len(idle)} parameters: a backward pass ended by an "
            "exception, and FSDP2, which waits for its end, gives none to shards from then on. Call zero_grad() and "
            "then reset_iter_state() of the root module (torch 2.13 and later) where the exception is caught, or make "
            "and load the model anew"
        )


def _warn_of_forgotten(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> None:
    """Where FSDP2 shards some of what is trained over ranks, and others are of no unit, as embeddings around blocks."""
    shards = {id(param) for param in params if isinstance(param, DTensor) and param.device_mesh.size() > 1}
    plain = [str(tuple(param.shape)) for param in params if param.grad is not None and not isinstance(param, DTensor)]
    if not plain or not shards:
        return
    if any(id(module._parameters.get(name)) in shards for module, name in _torch_private.all_managed()):
        warnings.warn(
            f"{type(optimizer).__name__} trains {len(plain)} parameters that belong to no unit of FSDP2, of shapes "
            f"{_first(plain)}, beside shards: unless somebody sums their gradients over ranks, these train them apart; "
            "call fully_shard(model) for the model around its units too, and make the optimizer then",
            stacklevel=4,
        )


def _maybe_gathered(idle: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    """Of those that have no gradient: FSDP2 takes it from what it gathered, and gives it to a shard.

    What lies as a parameter with a gradient does is a shard as that is, of a module that was not used.
    """
    trained = {_lies(param) for param in params if param.grad is not None}
    return [param for param in idle if not isinstance(param, DTensor) or _lies(param) not in trained]


def _lies(param: Tensor) -> Any:
    return (param.device_mesh, tuple(param.placements)) if isinstance(param, DTensor) else None


def _gathered_place(param: Tensor) -> tuple[torch.nn.Module, str, int] | None:
    """As `_torch_private.gathered_place`."""
    if param in _never_gathered:
        return None
    place = _torch_private.gathered_place(param)
    if place is None:
        _never_gathered[param] = True
    return place


def _first(names: list[str]) -> str:
    return f"{', '.join(names[:4])}{', ...' if names[4:] else ''}"
