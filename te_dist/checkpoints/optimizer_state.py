"""The state of an optimizer: by parameter name, sharded as the parameters are.

[Note: Why not torch's helpers]
`get_optimizer_state_dict` and `set_optimizer_state_dict` make a missing state by a step with zero gradients, which
quantizes every weight anew, and `Optimizer.load_state_dict` casts state to the dtype of its parameter, which would make
bf16 of fp32 moments. So state is described, allocated and filled here, for any optimizer that keeps a dictionary of
tensors and plain values for each parameter.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from te_dist._torch_private import sharded_like
from te_dist.checkpoints import extra, model_state
from te_dist.checkpoints.errors import CheckpointError
from te_dist.checkpoints.manifest import Manifest
from te_dist.tensor import QuantizedTensor
from te_dist.tensor.placement import local_tensor

MASTER = "master_param"  # high-precision values of a parameter, as te_dist.optim keeps them
_SCALE = "_scale"  # ends keys of the scales of state in codes
_NO_HYPERPARAMETERS = ("params", "param_names")  # of a group: those that each rank, and each model, has

# Their steps interpolate between moments and gradients, which have to be of one type.
_OF_ONE_TYPE = tuple(
    getattr(torch.optim, name)
    for name in ("Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam")
    if hasattr(torch.optim, name)  # not all of them are in every torch
)

Named = dict[str, Tensor]
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer | None)


def unwrapped(optimizer: AnyOptimizer) -> AnyOptimizer:
    """The optimizer inside of those that pass its groups and its state on, as accelerate and Lightning wrap one: they
    have none of the methods by which te_dist's own tell what they keep, and a class of their own name.

    One with state of its own around another stays as it is, as a lookahead.
    """
    found: Any = optimizer
    while isinstance(inner := getattr(found, "optimizer", None), Optimizer) and inner is not found:
        if any(getattr(found, name, None) is not getattr(inner, name) for name in ("state", "param_groups")):
            break
        found = inner
    return found


def describe(optimizer: Optimizer, named: Named) -> dict[str, Any]:
    """What a manifest says of an optimizer: its class, its groups, and each parameter's group and state.

    Raises:
        CheckpointError: a parameter is none of the model, or its state cannot be saved.
    """
    groups = [
        {k: _value(v, k) for k, v in group.items() if k not in _NO_HYPERPARAMETERS} for group in optimizer.param_groups
    ]
    params = {}
    for name, index, param in _params(optimizer, named):
        state = _state(optimizer, param)
        params[name] = {"group": index, "state": {k: _describe(v, f"{name}: {k}", param) for k, v in state.items()}}
    return {"class": _class_name(optimizer), "groups": groups, "params": params}


def tensors(optimizer: Optimizer, named: Named) -> dict[str, dict[str, Tensor]]:
    """By parameter and key, the tensors of the state."""
    found = {}
    for name, _, param in _params(optimizer, named):
        state = _state(optimizer, param)
        found[name] = {k: v.detach() for k, v in state.items() if isinstance(v, Tensor)}
    return {name: state for name, state in found.items() if state}


def mismatches(
    optimizer: Optimizer,
    named: Named,
    manifest: Manifest,
    *,
    converted: Container[str],
    packed_otherwise: Container[str] = (),
) -> list[str]:
    """Why a saved optimizer cannot be read into this one; empty where it can.

    Of parameters that are not saved, or in another shape, nothing is said: that is told of themselves.

    Args:
        converted: names of parameters that are read into another format.
        packed_otherwise: names of vectors that are packed in the model and separate in what is saved, or the other way
            round.
    """
    saved = manifest.optimizer
    if saved is None:
        return ["it holds no optimizer state"]
    if saved["class"] != _class_name(optimizer):
        return [f"it holds state of {saved['class']}, wanted {_class_name(optimizer)}"]
    if len(saved["groups"]) != len(optimizer.param_groups):
        return [f"it holds {len(saved['groups'])} parameter groups, wanted {len(optimizer.param_groups)}"]
    problems = []
    for name, index, param in _params(optimizer, named, among=saved["params"]):
        entry = saved["params"].get(name)
        if manifest.model.get(name, {}).get("shape") != list(param.shape):
            continue
        if entry is None:
            problems.append(f"{name} is not in the saved optimizer")
        elif entry["group"] != index:
            problems.append(f"{name} is in group {entry['group']} of the saved optimizer, in group {index} of this one")
        elif entry.get("differs"):
            problems.append(
                f"what is one parameter {name} here has other state, or groups, of the saved optimizer in each of its "
                "parts, wanted the same for all"
            )
        elif name in converted:
            problems += _conversion_mismatches(optimizer, name, param, manifest)
        else:
            _initialize(optimizer, param, entry["state"])
            found = _state_mismatches(optimizer, name, param, entry["state"])
            if found and name in packed_otherwise:
                found = _packing_mismatches(name, param, entry["state"]) or found
            problems += found
    return problems


def unexpected(optimizer: Optimizer, named: Named, saved: dict[str, Any]) -> set[str]:
    """Parameters of a saved optimizer that this one, on this rank, does not have."""
    return set(saved["params"]) - {name for name, _, _ in _params(optimizer, named, among=saved["params"])}


def allocate(optimizer: Optimizer, named: Named, saved: dict[str, Any]) -> dict[Tensor, dict[str, Any]]:
    """By parameter, the state to be filled: tensors that are there already are used again."""
    return {
        param: {
            key: _allocate(param, optimizer.state.get(param, {}).get(key), described, optimizer.param_groups[index])
            for key, described in saved["params"][name]["state"].items()
        }
        for name, index, param in _params(optimizer, named, among=saved["params"])
    }


def install(optimizer: Optimizer, states: dict[Tensor, dict[str, Any]], saved: dict[str, Any]) -> None:
    """Puts filled state and the saved hyperparameters into the optimizer."""
    for param, state in states.items():
        if state:
            _install(optimizer, param, state)
        else:
            optimizer.state.pop(param, None)
            getattr(optimizer, "begin_anew", lambda _: None)(param)
    for index, (group, values) in enumerate(zip(optimizer.param_groups, saved["groups"], strict=True)):
        for key, value in extra.join(values, {}).items():
            if key in _NO_HYPERPARAMETERS:
                continue
            its = group.get(key)
            if not isinstance(its, Tensor):
                group[key] = value
            elif any(other.get(key) is its for other in optimizer.param_groups[:index]) and its.item() != value:
                group[key] = torch.full_like(its, value)  # groups shared one until now
            else:
                its.fill_(value)


def _install(optimizer: Optimizer, param: Tensor, state: dict[str, Any]) -> None:
    """The state of a parameter that was loaded with it: its master, if there is one, has its values."""
    own = getattr(optimizer, "install_state", None)
    if own is not None:
        return own(param, state)
    optimizer.state[param] = state
    local = local_tensor(param)
    if isinstance(local, QuantizedTensor) and MASTER in state:
        take_over = getattr(optimizer, "take_over", None)
        local.storage.note_master() if take_over is None else take_over(param)


def state_parts(
    states: dict[Tensor, dict[str, Any]], named: Named, saved: dict[str, Any] | None
) -> dict[str, dict[str, Tensor]]:
    """Tensors of `allocate`, as they are named in what is said of the optimizer that was saved."""
    names = _names(named, among=() if saved is None else saved["params"])
    found = {names[id(p)]: {k: v for k, v in s.items() if isinstance(v, Tensor)} for p, s in states.items()}
    return {name: state for name, state in found.items() if state}


def _state(optimizer: Optimizer, param: Tensor) -> dict[str, Any]:
    """What is to be saved of a parameter; te_dist's optimizers know which masters have fallen behind."""
    current = getattr(optimizer, "current_state", None)
    return optimizer.state.get(param, {}) if current is None else current(param)


def _names(named: Named, among: Container[str] = ()) -> dict[int, str]:
    """Name by identity; of a tied parameter the first one, of those `among` others if one is there."""
    names = {id(tensor): name for name, tensor in reversed(named.items())}
    return names | {id(tensor): name for name, tensor in reversed(named.items()) if name in among}


def _params(optimizer: Optimizer, named: Named, among: Container[str] = ()) -> Iterator[tuple[str, int, Tensor]]:
    """(name, index of its group, parameter) of all parameters; see `_names`."""
    names = _names(named, among)
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise CheckpointError(
                    f"group {index} of the optimizer holds a parameter of shape {tuple(param.shape)} that is none of "
                    "the model; build the optimizer from model.parameters(), after sharding the model"
                )
            yield names[id(param)], index, param


def _value(value: Any, key: str) -> Any:
    """A hyperparameter for JSON; a tensor of one element (`capturable`) becomes a number."""
    if isinstance(value, Tensor):
        return value.item()
    tree, held = extra.split(value)
    if held:
        raise CheckpointError(f"optimizer group: {key} holds tensors; only numbers, text and their lists can be saved")
    return tree


def _describe(value: Any, what: str, param: Tensor) -> dict[str, Any]:
    if not isinstance(value, Tensor):
        return {"value": _value(value, what)}
    if isinstance(local_tensor(value), QuantizedTensor):
        raise CheckpointError(f"{what}: optimizer state that is quantized cannot be saved; keep it in high precision")
    if isinstance(param, DTensor) and not isinstance(value, DTensor) and value.dim():
        raise CheckpointError(
            f"{what} is a plain tensor of shape {tuple(value.shape)} while its parameter is sharded: where its parts "
            "belong is not known; keep it as a DTensor"
        )
    return {
        "shape": list(value.shape),
        "dtype": str(value.dtype)[6:],
        "beside_parameter": value.device == param.device,
    }


def _initialize(optimizer: Optimizer, param: Tensor, saved: dict[str, Any]) -> None:
    """Makes state whose places only the optimizer knows: of another shape than the parameter."""
    others = [each["shape"] for each in saved.values() if each.get("shape") and each["shape"] != list(param.shape)]
    initialize = getattr(optimizer, "initialize_state", None)
    if others and not optimizer.state.get(param) and initialize is not None:
        initialize(param)


def _conversion_mismatches(optimizer: Optimizer, name: str, param: Tensor, manifest: Manifest) -> list[str]:
    """As `_state_mismatches`, where a parameter is read into another format: masters, say, are kept of some only."""
    saved = manifest.optimizer["params"][name]["state"] if manifest.optimizer else {}
    _initialize(optimizer, param, saved)
    lacks_master = isinstance(local_tensor(param), QuantizedTensor) and saved and MASTER not in saved
    if (
        not lacks_master
        and not _goes_by_type(optimizer, param, manifest.model[name], saved)
        and not _state_mismatches(optimizer, name, param, saved)
    ):
        return []
    here, there = (model_state.format_name(each) for each in (model_state.describe(param), manifest.model[name]))
    return [
        f"{name} is saved as {there}, wanted {here}, and its saved optimizer state, {sorted(saved)}, is none of that "
        "format; load without optimizer= and make a new one, whose moments begin anew"
    ]


def _goes_by_type(optimizer: Optimizer, param: Tensor, described: dict[str, Any], saved: dict[str, Any]) -> bool:
    """Whether an optimizer takes state of the type of its parameter alone, which is not the one that was saved."""
    if not isinstance(optimizer, _OF_ONE_TYPE) or isinstance(local_tensor(param), QuantizedTensor):
        return False
    own = [each for each in saved.values() if each.get("shape") == list(param.shape)]
    return any(each["dtype"] == described["dtype"] != str(param.dtype)[6:] for each in own)


def _state_mismatches(optimizer: Optimizer, name: str, param: Tensor, saved: dict[str, Any]) -> list[str]:
    here = optimizer.state.get(param, {})
    if here and saved and set(here) != set(saved) and {MASTER} not in (set(saved), set(here)):
        return [f"{name} has optimizer state {sorted(saved)}, wanted {sorted(here)}; use the same options"]
    check = getattr(optimizer, "check_state", None)
    if saved and check is not None:
        try:
            check(param, {key: _dtype(described) for key, described in saved.items()}, may_begin=True)
        except ValueError as error:
            return [f"{name}: {error}"]
    return [
        f"{name}: {key} has shape {described['shape']} and is not there yet, so where its parts belong is not known; "
        "make one step with the optimizer before loading"
        for key, described in saved.items()
        if described.get("shape") and described["shape"] != list(param.shape) and not _fits(here.get(key), described)
    ]


def _packing_mismatches(name: str, param: Tensor, saved: dict[str, Any]) -> list[str]:
    """Of vectors that are packed otherwise: as a matrix they have moments in codes, where that is asked for, which they
    have not alone."""
    is_alone, has_codes = param.dim() < 2, any(key.endswith(_SCALE) for key in saved)  # noqa: PLR2004
    if is_alone != has_codes:
        return []
    here, there = ("separate", "packed") if is_alone else ("packed", "separate")
    return [
        f"{name} is {there} in it, with state {sorted(saved)}, wanted {here}: moments in bytes have codes where "
        "vectors are packed, and are float32 where they are separate, and neither is read into the other; pack them as "
        "in the saved model (single_grouped_bias of GroupedLinear), or save with moments in bfloat16 or float32"
    ]


def _dtype(described: dict[str, Any]) -> torch.dtype | None:
    """Of a saved tensor; None of a plain value."""
    return getattr(torch, described["dtype"]) if "dtype" in described else None


def _fits(value: Any, described: dict[str, Any]) -> bool:
    """Whether a saved tensor can be read into `value`."""
    return (
        isinstance(value, Tensor)
        and list(value.shape) == described["shape"]
        and str(value.dtype)[6:] == described["dtype"]
    )


def _allocate(param: Tensor, here: Any, described: dict[str, Any], group: dict[str, Any]) -> Any:
    if "value" in described:
        return extra.join(described["value"], {})
    if _fits(here, described):
        return here
    dtype = _dtype(described)
    if described["shape"] != list(param.shape) or not param.dim():
        # NOTE: torch's optimizers keep `step` on the CPU unless their kernels read it.
        beside = described["beside_parameter"] or group.get("capturable") or group.get("fused")
        return torch.empty(described["shape"], dtype=dtype, device=param.device if beside else "cpu")
    if not isinstance(param, DTensor):
        return torch.empty(param.shape, dtype=dtype, device=param.device)
    local = torch.empty(local_tensor(param).shape, dtype=dtype, device=param.device)
    return sharded_like(param, local)


def _class_name(optimizer: Optimizer) -> str:
    """That of an optimizer around another has both."""
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    wrapped = getattr(optimizer, "wrapped", None)
    return f"{name}({_class_name(wrapped)})" if isinstance(wrapped, Optimizer) else name
