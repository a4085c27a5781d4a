"""Initialization that does not depend on how a model is sharded.

Each parameter is initialized whole, one at a time, from a generator seeded by (seed, name); its scales are those of
the whole; then it is cut. Names are those the author gave: wrapping for torch.compile or recomputation changes no
value. On one kind of device the result is bit for bit the same for every mesh and world size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from te_dist._torch_private import given_name
from te_dist.fsdp2.check import warn_of_others
from te_dist.grouped import place_whole

_MANY_INTEGERS = (torch.int16, torch.int32, torch.int64)  # types that nobody needs every value of


@torch.no_grad()
def materialize(
    model: nn.Module,
    *,
    device: torch.device | str,
    seed: int,
    initialize: Callable[[nn.Module], object] | None = None,
) -> None:
    """Allocates all parameters and buffers of `model` on `device` and initializes them.

    A module that has `init_parameter(name, tensor)` fills each whole tensor in turn; any other one is asked for
    `reset_parameters()`, or handed to `initialize`, with its own parameters whole in place. Not collective.

    Args:
        model: on meta or anywhere, sharded or not; every parameter is initialized anew, one that modules share by the
            first of them.
        device: where parameters go. Buffers that have values keep them, unless a rule says otherwise.
        seed: any integer; equal seeds give equal models.
        initialize: rule of the library that the model is from, such as `_init_weights` of a Hugging Face model; fills
            the parameters and buffers of one module, not those of its children. What `te_dist.convert` has exchanged is
            handed to it as the module that was there before.

    Raises:
        ValueError: a module has parameters, or buffers on meta, and no way to initialize them, or its way left some of
            them without values.
    """
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()  # what a pass left gathered is no parameter
    warn_of_others(model, stacklevel=4)  # where this is called, past torch's decorator
    blank = {id(buffer) for buffer in model.buffers() if buffer.is_meta}
    if blank or any(param.is_meta for param in model.parameters()):
        blank = _allocate(model, device)
    done: set[int] = set()
    for prefix, module in model.named_modules():
        own = {n: p for n, p in module.named_parameters(recurse=False) if id(p) not in done}
        done |= {id(p) for p in own.values()}
        buffers = dict(module.named_buffers(recurse=False))
        empty = {name: buffer for name, buffer in buffers.items() if id(buffer) in blank}
        blank -= {id(buffer) for buffer in empty.values()}  # what modules share the first of them fills
        for buffer in empty.values():
            _blank_out(buffer)
        if initialize is not None and not _has_rule_of_its_own(module):
            if own or buffers:
                _initialize_by(initialize, module, given_name(prefix), own, seed)
        elif own or empty or (buffers and hasattr(module, "reset_parameters")):
            _initialize(module, given_name(prefix), own, seed)
        left = {n: b for n, b in module.named_buffers(recurse=False) if n in empty}
        _check_filled(module, given_name(prefix), left)


def _has_rule_of_its_own(module: nn.Module) -> bool:
    """Whether it is none of the library's that the model is from."""
    return hasattr(module, "init_parameter") and not getattr(module, "exchanged", ())


def _allocate(model: nn.Module, device: torch.device | str) -> set[int]:
    """`to_empty`, which makes a tensor for each place; what modules share they share afterwards.

    Returns:
        ids of the buffers that have no values, since they were on meta. Others keep theirs.
    """
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    values: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((held, name))
        values |= {id(buffer): buffer for buffer in module.buffers(recurse=False) if not buffer.is_meta}
    buffers = {id(buffer) for buffer in model.buffers()}
    model.to_empty(device=device)
    blank = set()
    for key, ((held, name), *others) in places.items():
        for other, its_name in others:
            other[its_name] = held[name]
        if key in values:
            held[name].copy_(values[key])
        elif key in buffers:
            blank.add(id(held[name]))
    return blank


def _initialize(module: nn.Module, prefix: str, own: dict[str, nn.Parameter], seed: int) -> None:
    init_parameter = getattr(module, "init_parameter", None)
    if init_parameter is not None:
        for name, param in own.items():
            whole = _whole(param)
            with _seeded(seed, f"{prefix}.{name}", whole.device):
                init_parameter(name, whole)
            _check_filled(module, prefix, {name: whole})
            place_whole(param, whole)
    if init_parameter is not None and not any(True for _ in module.buffers(recurse=False)):
        return
    reset_parameters = getattr(module, "reset_parameters", None)
    if reset_parameters is None:
        raise ValueError(
            f"{prefix or 'the root module'} ({type(module).__name__}) has {sorted(own) or 'buffers'} and neither "
            "init_parameter nor reset_parameters; pass initialize=, the rule of the library that it is from "
            "(model._init_weights of transformers), give it a reset_parameters() that initializes them (assigned "
            "to the module, where the class is somebody else's), or build the model on a device and leave this call out"
        )
    every = dict(module.named_parameters(recurse=False))  # with what an earlier module has initialized
    with _whole_in_place(module, every) as wholes, _seeded(seed, prefix, _device(module)):
        reset_parameters()
    if init_parameter is None:
        _check_filled(module, prefix, {name: wholes[name] for name in own})
        _place(wholes, own)


def _initialize_by(
    initialize: Callable[[nn.Module], object], module: nn.Module, prefix: str, own: dict[str, nn.Parameter], seed: int
) -> None:
    (known,) = getattr(module, "exchanged", ()) or (module,)
    every = dict(module.named_parameters(recurse=False))
    with _whole_in_place(known, every) as wholes, _seeded(seed, prefix, _device(module)):
        initialize(known)
    _check_filled(known, prefix, {name: wholes[name] for name in own})
    _place(wholes, own)


def _blank_out(tensor: Tensor) -> None:
    """Fills with what no rule does: NaN, or the smallest of many integers; zeros where every value may be meant."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(math.nan)
    elif tensor.dtype in _MANY_INTEGERS:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
    else:
        tensor.zero_()


def _check_filled(module: nn.Module, prefix: str, tensors: dict[str, Tensor]) -> None:
    """Raises where values of `_blank_out` are left."""
    left = [
        name
        for name, tensor in tensors.items()
        if (tensor == torch.iinfo(tensor.dtype).min if tensor.dtype in _MANY_INTEGERS else tensor.isnan()).any()
    ]
    if left:
        raise ValueError(
            f"{prefix or 'the root module'} ({type(module).__name__}): its rule of initialization left {left} without "
            "values; have reset_parameters(), init_parameter or initialize= fill these as well, also what __init__ has "
            "put into them: parameters are filled anew, and on the meta device nothing has values"
        )


def _place(wholes: dict[str, Tensor], own: dict[str, nn.Parameter]) -> None:
    for name, param in own.items():
        place_whole(param, wholes[name])


def _device(module: nn.Module) -> torch.device:
    return next(t.device for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)))


def _whole(param: nn.Parameter) -> Tensor:
    whole = torch.empty(param.shape, dtype=param.dtype, device=param.device)
    _blank_out(whole)
    return whole


@contextmanager
def _whole_in_place(module: nn.Module, every: dict[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """Plain parameters of whole size in the place of the module's own."""
    wholes = {name: _whole(param) for name, param in every.items()}
    before = {name: module._parameters[name] for name in every}
    try:
        for name, whole in wholes.items():
            module.register_parameter(name, nn.Parameter(whole, requires_grad=False))
        yield wholes
    finally:
        for name, param in before.items():
            module.register_parameter(name, param)


@contextmanager
def _seeded(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """torch's generators, seeded by (seed, name) and put back afterwards."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        yield
